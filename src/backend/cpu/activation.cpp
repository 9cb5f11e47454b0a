#include "backend/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/lane_math.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using lane::load, lane::store;

// Elements of work of a piece: an exponential costs several copies.
constexpr int64_t kPiece = kPieceElements / 4;

template <class T>
struct SwiGluRows {
  const T *x, *dy;
  T* out;  // the value, or dx where dy is given
  int64_t width;
};

// What is __restrict must be a parameter: GCC does not believe it of local variables.
template <class T>
[[gnu::always_inline]] inline void swiglu_row(const T* __restrict gate, const T* __restrict up, T* __restrict out, int64_t width) {
  for (int64_t j = 0; j < width; ++j) {
    const float g = load(gate[j]);
    store(out[j], g * load(up[j]) / (1.0F + lane::exp_clamped(-g)));
  }
}

// With s = sigmoid(g): dgate = dy up s (1 + g (1 - s)), dup = dy g s.
template <class T>
[[gnu::always_inline]] inline void swiglu_row_backward(const T* __restrict gate, const T* __restrict up, const T* __restrict dy,
                                                       T* __restrict dgate, T* __restrict dup, int64_t width) {
  for (int64_t j = 0; j < width; ++j) {
    const float g = load(gate[j]), s = lane::sigmoid(g), ds = load(dy[j]) * s;
    store(dgate[j], ds * load(up[j]) * lane::fma(g, 1.0F - s, 1.0F));
    store(dup[j], ds * g);
  }
}

template <class T>
[[gnu::always_inline]] inline void swiglu_rows(SwiGluRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T* gate = k.x + 2 * i * k.width;
    lane::prefetch_row(gate + 2 * k.width, 2 * k.width);
    swiglu_row(gate, gate + k.width, k.out + i * k.width, k.width);
  }
}
template <class T>
[[gnu::always_inline]] inline void swiglu_rows_backward(SwiGluRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T* gate = k.x + 2 * i * k.width;
    T* dgate = k.out + 2 * i * k.width;
    lane::prefetch_row(gate + 2 * k.width, 2 * k.width);
    swiglu_row_backward(gate, gate + k.width, k.dy + i * k.width, dgate, dgate + k.width, k.width);
  }
}

MANTISSA_CLONES void swiglu(SwiGluRows<float> k, int64_t begin, int64_t end) { swiglu_rows(k, begin, end); }
MANTISSA_CLONES void swiglu(SwiGluRows<bf16> k, int64_t begin, int64_t end) { swiglu_rows(k, begin, end); }
MANTISSA_CLONES void swiglu_backward(SwiGluRows<float> k, int64_t begin, int64_t end) { swiglu_rows_backward(k, begin, end); }
MANTISSA_CLONES void swiglu_backward(SwiGluRows<bf16> k, int64_t begin, int64_t end) { swiglu_rows_backward(k, begin, end); }

struct Slope {
  float value, derivative;
};

// 0.5 (1 + tanh(u)) is sigmoid(2u): one exponential, and no cancellation for negative x. Here u2 = 2u and du2 its derivative.
struct GeluTanh {
  [[gnu::always_inline]] static Slope at(float x) {
    constexpr float kTwiceFactor = 1.59576912F, kCubic = kTwiceFactor * 0.044715F;  // 2 sqrt(2/pi)
    const float square = x * x, u2 = x * lane::fma(square, kCubic, kTwiceFactor), du2 = lane::fma(square, 3.0F * kCubic, kTwiceFactor);
    const float s = lane::sigmoid(u2), value = x * s;
    return {value, lane::fma(value * (1.0F - s), du2, s)};
  }
};

struct GeluErf {
  [[gnu::always_inline]] static Slope at(float x) {
    constexpr float kDensity = 0.398942280F;  // 1 / sqrt(2 pi)
    const lane::Normal normal = lane::normal(x);
    return {x * normal.cdf, lane::fma(x * normal.bell, kDensity, normal.cdf)};
  }
};

template <class Form, class T>
[[gnu::always_inline]] inline void gelu(const T* __restrict x, T* __restrict out, int64_t n) {
  for (int64_t j = 0; j < n; ++j) store(out[j], Form::at(load(x[j])).value);
}
template <class Form, class T>
[[gnu::always_inline]] inline void gelu_backward(const T* __restrict x, const T* __restrict dy, T* __restrict dx, int64_t n) {
  for (int64_t j = 0; j < n; ++j) store(dx[j], load(dy[j]) * Form::at(load(x[j])).derivative);
}

MANTISSA_CLONES void gelu_tanh(const float* x, float* out, int64_t n) { gelu<GeluTanh>(x, out, n); }
MANTISSA_CLONES void gelu_tanh(const bf16* x, bf16* out, int64_t n) { gelu<GeluTanh>(x, out, n); }
MANTISSA_CLONES void gelu_erf(const float* x, float* out, int64_t n) { gelu<GeluErf>(x, out, n); }
MANTISSA_CLONES void gelu_erf(const bf16* x, bf16* out, int64_t n) { gelu<GeluErf>(x, out, n); }
MANTISSA_CLONES void gelu_tanh_backward(const float* x, const float* dy, float* dx, int64_t n) { gelu_backward<GeluTanh>(x, dy, dx, n); }
MANTISSA_CLONES void gelu_tanh_backward(const bf16* x, const bf16* dy, bf16* dx, int64_t n) { gelu_backward<GeluTanh>(x, dy, dx, n); }
MANTISSA_CLONES void gelu_erf_backward(const float* x, const float* dy, float* dx, int64_t n) { gelu_backward<GeluErf>(x, dy, dx, n); }
MANTISSA_CLONES void gelu_erf_backward(const bf16* x, const bf16* dy, bf16* dx, int64_t n) { gelu_backward<GeluErf>(x, dy, dx, n); }

template <class T>
void forward(const SwiGluForward& k) {
  const SwiGluRows<T> rows{.x = k.x.data<T>(), .dy = nullptr, .out = k.out.data<T>(), .width = k.out.dim(1)};
  parallel_for(k.out.dim(0), std::max<int64_t>(1, kPiece / std::max<int64_t>(1, rows.width)),
               [&](int64_t begin, int64_t end) { swiglu(rows, begin, end); });
}

template <class T>
void backward(const SwiGluBackward& k) {
  const SwiGluRows<T> rows{.x = k.x.data<T>(), .dy = k.dy.data<T>(), .out = k.dx.data<T>(), .width = k.dy.dim(1)};
  parallel_for(k.dy.dim(0), std::max<int64_t>(1, kPiece / std::max<int64_t>(1, rows.width)),
               [&](int64_t begin, int64_t end) { swiglu_backward(rows, begin, end); });
}

template <class T>
void forward(const GeluForward& k) {
  const T* x = k.x.data<T>();
  T* out = k.out.data<T>();
  parallel_for(k.x.elements(), kPiece, [&](int64_t begin, int64_t end) {
    k.form == GeluForm::tanh ? gelu_tanh(x + begin, out + begin, end - begin) : gelu_erf(x + begin, out + begin, end - begin);
  });
}

template <class T>
void backward(const GeluBackward& k) {
  const T *x = k.x.data<T>(), *dy = k.dy.data<T>();
  T* dx = k.dx.data<T>();
  parallel_for(k.x.elements(), kPiece, [&](int64_t begin, int64_t end) {
    k.form == GeluForm::tanh ? gelu_tanh_backward(x + begin, dy + begin, dx + begin, end - begin)
                             : gelu_erf_backward(x + begin, dy + begin, dx + begin, end - begin);
  });
}

}  // namespace

void CpuBackend::run(const SwiGluForward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? forward<float>(k) : forward<bf16>(k);
}

void CpuBackend::run(const SwiGluBackward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? backward<float>(k) : backward<bf16>(k);
}

void CpuBackend::run(const GeluForward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? forward<float>(k) : forward<bf16>(k);
}

void CpuBackend::run(const GeluBackward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? backward<float>(k) : backward<bf16>(k);
}

}  // namespace mantissa
