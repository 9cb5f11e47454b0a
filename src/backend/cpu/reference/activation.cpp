#include <cmath>
#include <numbers>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"

namespace mantissa {
namespace {

template <class S>
S sigmoid(S x) {
  return S{1} / (S{1} + std::exp(-x));
}

// The value and the derivative.
template <class S>
struct Slope {
  S value, derivative;
};

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3).
template <class S>
Slope<S> gelu_tanh(S x) {
  const S factor = static_cast<S>(std::numbers::sqrt2 * std::numbers::inv_sqrtpi), cubic = static_cast<S>(0.044715),
          half = static_cast<S>(0.5);
  const S t = std::tanh(factor * (x + cubic * x * x * x));
  const S du = factor * (S{1} + S{3} * cubic * x * x);
  return {half * x * (S{1} + t), half * (S{1} + t) + half * x * (S{1} - t * t) * du};
}

// x Phi(x), Phi(x) = 0.5 (1 + erf(x / sqrt(2))).
template <class S>
Slope<S> gelu_erf(S x) {
  const S half = static_cast<S>(0.5), root_half = static_cast<S>(1.0 / std::numbers::sqrt2);
  const S density = static_cast<S>(std::numbers::inv_sqrtpi / std::numbers::sqrt2) * std::exp(-half * x * x);
  const S phi = half * (S{1} + std::erf(x * root_half));
  return {x * phi, phi + x * density};
}

template <class S>
Slope<S> gelu(S x, GeluForm form) {
  return form == GeluForm::tanh ? gelu_tanh(x) : gelu_erf(x);
}

// The weight of a row, 1 without weights.
template <class S>
S row_weight(const Tensor& weights, int64_t row) {
  return weights.defined() ? weights.device_data<S>()[row] : S{1};
}

// What a gate and what it lets through become, and both derivatives.
template <class S>
struct Gated {
  S value, dgate, dup;
};

// With s = sigmoid(gate): dgate = up s (1 + gate (1 - s)), dup = gate s.
template <class S>
Gated<S> plain_glu(S gate, S up) {
  const S s = sigmoid(gate);
  return {gate * s * up, up * s * (S{1} + gate * (S{1} - s)), gate * s};
}

// As torch's clamp, whose derivative is 1 at its bounds. NaN stays.
template <class S>
Gated<S> clamped_glu(S gate, S up, S limit) {
  const S slope = static_cast<S>(1.702), g = gate > limit ? limit : gate, u = up > limit ? limit : (up < -limit ? -limit : up);
  const S s = sigmoid(slope * g);
  return {g * s * (u + S{1}), gate > limit ? S{0} : (u + S{1}) * s * (S{1} + slope * g * (S{1} - s)), std::abs(up) > limit ? S{0} : g * s};
}

template <class S>
Gated<S> glu(S gate, S up, double limit) {
  return limit > 0.0 ? clamped_glu(gate, up, static_cast<S>(limit)) : plain_glu(gate, up);
}

template <class T>
void swiglu(const SwiGluForward& k) {
  using S = Arithmetic<T>;
  const int64_t width = k.out.dim(1);
  for (int64_t i = 0; i < k.out.dim(0); ++i) {
    const T *gate = k.x.device_data<T>() + 2 * i * width, *up = gate + width;
    T* out = k.out.device_data<T>() + i * width;
    const S weight = row_weight<S>(k.row_weights, i);
    for (int64_t j = 0; j < width; ++j) out[j] = store<T>(glu<S>(load(gate[j]), load(up[j]), k.limit).value * weight);
  }
}

// Both derivatives times dy and the weight, whose gradient is the sum of dy times the values.
template <class T>
void swiglu_backward(const SwiGluBackward& k) {
  using S = Arithmetic<T>;
  const int64_t width = k.dy.dim(1);
  for (int64_t i = 0; i < k.dy.dim(0); ++i) {
    const T *gate = k.x.device_data<T>() + 2 * i * width, *up = gate + width, *dy = k.dy.device_data<T>() + i * width;
    T *dgate = k.dx.device_data<T>() + 2 * i * width, *dup = dgate + width;
    const S weight = row_weight<S>(k.row_weights, i);
    S dweight = 0;
    for (int64_t j = 0; j < width; ++j) {
      const Gated<S> gated = glu<S>(load(gate[j]), load(up[j]), k.limit);
      const S d = load(dy[j]) * weight;
      dgate[j] = store<T>(d * gated.dgate);
      dup[j] = store<T>(d * gated.dup);
      dweight += load(dy[j]) * gated.value;
    }
    if (k.drow_weights.defined()) k.drow_weights.device_data<S>()[i] = dweight;
  }
}

}  // namespace

void CpuReference::execute(const SwiGluForward& k) {
  with_values(k.x.dtype(), [&]<class T>() { swiglu<T>(k); });
}

void CpuReference::execute(const SwiGluBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() { swiglu_backward<T>(k); });
}

void CpuReference::execute(const GeluForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    T* out = k.out.device_data<T>();
    for (int64_t i = 0; i < k.x.elements(); ++i) out[i] = store<T>(gelu(load(x[i]), k.form).value);
  });
}

void CpuReference::execute(const GeluBackward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T *x = k.x.device_data<T>(), *dy = k.dy.device_data<T>();
    T* dx = k.dx.device_data<T>();
    for (int64_t i = 0; i < k.x.elements(); ++i) dx[i] = store<T>(load(dy[i]) * gelu(load(x[i]), k.form).derivative);
  });
}

}  // namespace mantissa
