#include "backend/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/simd.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats, simd::load, simd::store;

// Elements of work of a piece: an exponential costs several copies.
constexpr int64_t kPiece = kPieceElements / 4;

template <class T>
struct SwiGluRows {
  const T *x, *dy;
  T* out;  // the value, or dx where dy is given
  int64_t width;
};

template <class T>
[[gnu::always_inline]] inline void swiglu_rows(SwiGluRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T *gate = k.x + 2 * i * k.width, *up = gate + k.width;
    T* out = k.out + i * k.width;
    simd::for_lanes(
        k.width, [&](int64_t j, auto part) __attribute__((always_inline)) {
          const Floats g = load(gate + j, part);
          store(out + j, g * simd::sigmoid(g) * load(up + j, part), part);
        });
  }
}

// With s = sigmoid(g): dgate = dy up s (1 + g (1 - s)), dup = dy g s.
template <class T>
[[gnu::always_inline]] inline void swiglu_rows_backward(SwiGluRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const T *gate = k.x + 2 * i * k.width, *up = gate + k.width, *dy = k.dy + i * k.width;
    T *dgate = k.out + 2 * i * k.width, *dup = dgate + k.width;
    simd::for_lanes(
        k.width, [&](int64_t j, auto part) __attribute__((always_inline)) {
          const Floats g = load(gate + j, part), s = simd::sigmoid(g), ds = load(dy + j, part) * s;
          store(dup + j, ds * g, part);
          store(dgate + j, ds * load(up + j, part) * (1.0F + g * (1.0F - s)), part);
        });
  }
}

MANTISSA_CLONES void swiglu(SwiGluRows<float> k, int64_t begin, int64_t end) { swiglu_rows(k, begin, end); }
MANTISSA_CLONES void swiglu(SwiGluRows<bf16> k, int64_t begin, int64_t end) { swiglu_rows(k, begin, end); }
MANTISSA_CLONES void swiglu_backward(SwiGluRows<float> k, int64_t begin, int64_t end) { swiglu_rows_backward(k, begin, end); }
MANTISSA_CLONES void swiglu_backward(SwiGluRows<bf16> k, int64_t begin, int64_t end) { swiglu_rows_backward(k, begin, end); }

struct Slope {
  Floats value, derivative;
};

// 0.5 (1 + tanh(u)) is sigmoid(2u): one exponential, and no cancellation for negative x. Here u2 = 2u and du2 its derivative.
struct GeluTanh {
  [[gnu::always_inline]] static Slope at(Floats x) {
    constexpr float kTwiceFactor = 1.59576912F, kCubic = 0.044715F;  // 2 sqrt(2/pi)
    const Floats square = x * x;
    const Floats u2 = kTwiceFactor * x * (1.0F + kCubic * square), du2 = kTwiceFactor * (1.0F + 3.0F * kCubic * square);
    const Floats s = simd::sigmoid(u2);
    return {x * s, s + x * s * (1.0F - s) * du2};
  }
};

struct GeluErf {
  [[gnu::always_inline]] static Slope at(Floats x) {
    constexpr float kDensity = 0.398942280F;  // 1 / sqrt(2 pi)
    const simd::Normal normal = simd::normal(x);
    return {x * normal.cdf, normal.cdf + x * normal.bell * kDensity};
  }
};

template <class T>
struct GeluRange {
  const T *x, *dy;
  T* out;  // the value, or dx where dy is given
};

template <class Form, class T>
[[gnu::always_inline]] inline void gelu_range(GeluRange<T> k, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part)
                       __attribute__((always_inline)) { store(k.out + begin + j, Form::at(load(k.x + begin + j, part)).value, part); });
}
template <class Form, class T>
[[gnu::always_inline]] inline void gelu_range_backward(GeluRange<T> k, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) {
        store(k.out + begin + j, load(k.dy + begin + j, part) * Form::at(load(k.x + begin + j, part)).derivative, part);
      });
}

MANTISSA_CLONES void gelu_tanh(GeluRange<float> k, int64_t begin, int64_t end) { gelu_range<GeluTanh>(k, begin, end); }
MANTISSA_CLONES void gelu_tanh(GeluRange<bf16> k, int64_t begin, int64_t end) { gelu_range<GeluTanh>(k, begin, end); }
MANTISSA_CLONES void gelu_erf(GeluRange<float> k, int64_t begin, int64_t end) { gelu_range<GeluErf>(k, begin, end); }
MANTISSA_CLONES void gelu_erf(GeluRange<bf16> k, int64_t begin, int64_t end) { gelu_range<GeluErf>(k, begin, end); }
MANTISSA_CLONES void gelu_tanh_backward(GeluRange<float> k, int64_t begin, int64_t end) { gelu_range_backward<GeluTanh>(k, begin, end); }
MANTISSA_CLONES void gelu_tanh_backward(GeluRange<bf16> k, int64_t begin, int64_t end) { gelu_range_backward<GeluTanh>(k, begin, end); }
MANTISSA_CLONES void gelu_erf_backward(GeluRange<float> k, int64_t begin, int64_t end) { gelu_range_backward<GeluErf>(k, begin, end); }
MANTISSA_CLONES void gelu_erf_backward(GeluRange<bf16> k, int64_t begin, int64_t end) { gelu_range_backward<GeluErf>(k, begin, end); }

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
  const GeluRange<T> range{.x = k.x.data<T>(), .dy = nullptr, .out = k.out.data<T>()};
  const bool tanh = k.form == GeluForm::tanh;
  parallel_for(k.x.elements(), kPiece,
               [&](int64_t begin, int64_t end) { tanh ? gelu_tanh(range, begin, end) : gelu_erf(range, begin, end); });
}

template <class T>
void backward(const GeluBackward& k) {
  const GeluRange<T> range{.x = k.x.data<T>(), .dy = k.dy.data<T>(), .out = k.dx.data<T>()};
  const bool tanh = k.form == GeluForm::tanh;
  parallel_for(k.x.elements(), kPiece,
               [&](int64_t begin, int64_t end) { tanh ? gelu_tanh_backward(range, begin, end) : gelu_erf_backward(range, begin, end); });
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
