#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/lane_map.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Elements of work of a piece: an exponential costs several copies.
constexpr int64_t kPiece = kPieceElements / 4;

template <class T>
struct SwiGluRows {
  const T *x, *dy;
  T* out;  // the value, or dx where dy is given
  int64_t width;
};

template <class T>
struct SwiGlu {
  [[gnu::always_inline]] float first(float gate, float) const { return lane::exponent(gate * -lane::kLog2E); }
  [[gnu::always_inline]] float operator()(float gate, float up, float t) const { return gate * up / (1.0F + lane::exp2_inside<T>(t)); }
};

// With s = sigmoid(gate): dgate = dy up s (1 + gate (1 - s)), dup = dy gate s.
template <class T>
struct SwiGluSlopes {
  [[gnu::always_inline]] lane::Two operator()(float gate, float up, float dy) const {
    const float s = 1.0F / (1.0F + lane::exp2_inside<T>(lane::exponent(gate * -lane::kLog2E))), ds = dy * s;
    return {ds * up * lane::fma(gate, 1.0F - s, 1.0F), ds * gate};
  }
};

template <class T>
[[gnu::always_inline]] inline void swiglu_rows(SwiGluRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T* gate = k.x + 2 * i * k.width;
    lane::prefetch_row(gate + 2 * k.width, 2 * k.width);
    lane::map_steps(SwiGlu<T>{}, k.width, k.out + i * k.width, gate, gate + k.width);
  }
}
template <class T>
[[gnu::always_inline]] inline void swiglu_rows_backward(SwiGluRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T* gate = k.x + 2 * i * k.width;
    T* dgate = k.out + 2 * i * k.width;
    lane::prefetch_row(gate + 2 * k.width, 2 * k.width);
    lane::map(SwiGluSlopes<T>{}, k.width, dgate, dgate + k.width, gate, gate + k.width, k.dy + i * k.width);
  }
}

MANTISSA_CLONES void swiglu(SwiGluRows<float> k, int64_t begin, int64_t end) { swiglu_rows(k, begin, end); }
MANTISSA_CLONES void swiglu(SwiGluRows<bf16> k, int64_t begin, int64_t end) { swiglu_rows(k, begin, end); }
MANTISSA_CLONES void swiglu_backward(SwiGluRows<float> k, int64_t begin, int64_t end) { swiglu_rows_backward(k, begin, end); }
MANTISSA_CLONES void swiglu_backward(SwiGluRows<bf16> k, int64_t begin, int64_t end) { swiglu_rows_backward(k, begin, end); }

// 0.5 (1 + tanh(u)) is sigmoid(2u): one exponential, and no cancellation for negative x.
template <class T>
struct GeluTanh {
  static constexpr float kFactor = -lane::kLog2E * 1.59576912F, kCubic = kFactor * 0.044715F;  // 2 sqrt(2/pi), for 2^-2u
  [[gnu::always_inline]] float first(float x) const { return lane::exponent(x * lane::fma(x * x, kCubic, kFactor)); }
  [[gnu::always_inline]] float operator()(float x, float t) const { return x / (1.0F + lane::exp2_inside<T>(t)); }
};
template <class T>
struct GeluTanhSlope {
  [[gnu::always_inline]] float first(float x, float) const { return GeluTanh<T>{}.first(x); }
  [[gnu::always_inline]] float operator()(float x, float dy, float t) const {
    constexpr float kFactor = 1.59576912F, kCubic = 3.0F * kFactor * 0.044715F;
    const float s = 1.0F / (1.0F + lane::exp2_inside<T>(t));
    return dy * lane::fma(x * s * (1.0F - s), lane::fma(x * x, kCubic, kFactor), s);
  }
};

template <class T>
struct GeluErf {
  [[gnu::always_inline]] float operator()(float x) const {
    const lane::NormalTail normal = lane::normal_tail<T>(x);
    return lane::fma(-normal.inside, normal.tail, x < 0.0F ? 0.0F : x);  // x (1 - tail) or x tail
  }
};
template <class T>
struct GeluErfSlope {
  [[gnu::always_inline]] float operator()(float x, float dy) const {
    constexpr float kDensity = 0.398942280F;  // 1 / sqrt(2 pi)
    const lane::NormalTail normal = lane::normal_tail<T>(x);
    const float cdf = __builtin_fabsf((x < 0.0F ? 0.0F : 1.0F) - normal.tail);  // without a branch
    return dy * lane::fma(x * normal.bell, kDensity, cdf);
  }
};

MANTISSA_CLONES void gelu_tanh(const float* x, float* out, int64_t n) { lane::map_steps(GeluTanh<float>{}, n, out, x); }
MANTISSA_CLONES void gelu_tanh(const bf16* x, bf16* out, int64_t n) { lane::map_steps(GeluTanh<bf16>{}, n, out, x); }
MANTISSA_CLONES void gelu_erf(const float* x, float* out, int64_t n) { lane::map(GeluErf<float>{}, n, out, x); }
MANTISSA_CLONES void gelu_erf(const bf16* x, bf16* out, int64_t n) { lane::map(GeluErf<bf16>{}, n, out, x); }
MANTISSA_CLONES void gelu_tanh_backward(const float* x, const float* dy, float* dx, int64_t n) {
  lane::map_steps(GeluTanhSlope<float>{}, n, dx, x, dy);
}
MANTISSA_CLONES void gelu_tanh_backward(const bf16* x, const bf16* dy, bf16* dx, int64_t n) {
  lane::map_steps(GeluTanhSlope<bf16>{}, n, dx, x, dy);
}
MANTISSA_CLONES void gelu_erf_backward(const float* x, const float* dy, float* dx, int64_t n) {
  lane::map(GeluErfSlope<float>{}, n, dx, x, dy);
}
MANTISSA_CLONES void gelu_erf_backward(const bf16* x, const bf16* dy, bf16* dx, int64_t n) {
  lane::map(GeluErfSlope<bf16>{}, n, dx, x, dy);
}

template <class T>
void forward(const SwiGluForward& k) {
  const SwiGluRows<T> rows{.x = k.x.device_data<T>(), .dy = nullptr, .out = k.out.device_data<T>(), .width = k.out.dim(1)};
  parallel_for(k.out.dim(0), std::max<int64_t>(1, kPiece / std::max<int64_t>(1, rows.width)),
               [&](int64_t begin, int64_t end) { swiglu(rows, begin, end); });
}

template <class T>
void backward(const SwiGluBackward& k) {
  const SwiGluRows<T> rows{.x = k.x.device_data<T>(), .dy = k.dy.device_data<T>(), .out = k.dx.device_data<T>(), .width = k.dy.dim(1)};
  parallel_for(k.dy.dim(0), std::max<int64_t>(1, kPiece / std::max<int64_t>(1, rows.width)),
               [&](int64_t begin, int64_t end) { swiglu_backward(rows, begin, end); });
}

template <class T>
void forward(const GeluForward& k) {
  const T* x = k.x.device_data<T>();
  T* out = k.out.device_data<T>();
  parallel_for(k.x.elements(), kPiece, [&](int64_t begin, int64_t end) {
    k.form == GeluForm::tanh ? gelu_tanh(x + begin, out + begin, end - begin) : gelu_erf(x + begin, out + begin, end - begin);
  });
}

template <class T>
void backward(const GeluBackward& k) {
  const T *x = k.x.device_data<T>(), *dy = k.dy.device_data<T>();
  T* dx = k.dx.device_data<T>();
  parallel_for(k.x.elements(), kPiece, [&](int64_t begin, int64_t end) {
    k.form == GeluForm::tanh ? gelu_tanh_backward(x + begin, dy + begin, dx + begin, end - begin)
                             : gelu_erf_backward(x + begin, dy + begin, dx + begin, end - begin);
  });
}

}  // namespace

void CpuBackend::execute(const SwiGluForward& k) {
  if (k.row_weights.defined()) return CpuReference::execute(k);
  k.x.dtype() == Dtype::f32 ? forward<float>(k) : forward<bf16>(k);
}

void CpuBackend::execute(const SwiGluBackward& k) {
  if (k.row_weights.defined()) return CpuReference::execute(k);
  k.x.dtype() == Dtype::f32 ? backward<float>(k) : backward<bf16>(k);
}

void CpuBackend::execute(const GeluForward& k) { k.x.dtype() == Dtype::f32 ? forward<float>(k) : forward<bf16>(k); }

void CpuBackend::execute(const GeluBackward& k) { k.x.dtype() == Dtype::f32 ? backward<float>(k) : backward<bf16>(k); }

}  // namespace mantissa
