// SwiGLU and GELU of an element, and their derivatives, as all backends compute them; each has its own sigmoid.
#pragma once

#include <cmath>
#include <numbers>

#include "mantissa/base/host_device.h"

namespace mantissa {

// The value of a gated element, and its derivatives by the gate and by what the gate lets through.
template <class S>
struct Gated {
  S value, dgate, dup;
};

struct PlainSigmoid {
  template <class S>
  MANTISSA_HOST_DEVICE static S at(S x) {
    return S{1} / (S{1} + std::exp(-x));
  }
};

// With s = sigmoid(gate): dgate = up s (1 + gate (1 - s)), dup = gate s.
template <class Sigmoid = PlainSigmoid, class S>
MANTISSA_HOST_DEVICE Gated<S> plain_glu(S gate, S up) {
  const S s = Sigmoid::at(gate);
  return {gate * s * up, up * s * (S{1} + gate * (S{1} - s)), gate * s};
}

// Clamps like torch, whose clamp has the derivative 1 at its bounds. NaN stays.
template <class Sigmoid = PlainSigmoid, class S>
MANTISSA_HOST_DEVICE Gated<S> clamped_glu(S gate, S up, S limit) {
  const S slope = static_cast<S>(1.702), g = gate > limit ? limit : gate, u = up > limit ? limit : (up < -limit ? -limit : up);
  const S s = Sigmoid::at(slope * g);
  return {g * s * (u + S{1}), gate > limit ? S{0} : (u + S{1}) * s * (S{1} + slope * g * (S{1} - s)), std::abs(up) > limit ? S{0} : g * s};
}

template <class S>
MANTISSA_HOST_DEVICE Gated<S> glu(S gate, S up, S limit) {
  return limit > S{0} ? clamped_glu(gate, up, limit) : plain_glu(gate, up);
}

// The value and the derivative.
template <class S>
struct Slope {
  S value, derivative;
};

// 0.5 x (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2 u).
struct TanhForm {
  template <class Sigmoid = PlainSigmoid, class S>
  MANTISSA_HOST_DEVICE static Slope<S> at(S x) {
    const S factor = static_cast<S>(2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi), cubic = static_cast<S>(0.044715) * factor;
    const S square = x * x, s = Sigmoid::at(x * (factor + cubic * square)), slope = factor + S{3} * cubic * square;
    return {x * s, s + x * slope * (s * (S{1} - s))};
  }
};

// x Phi(x), Phi(x) = 0.5 (1 + erf(x / sqrt(2))).
struct ErfForm {
  template <class Sigmoid = PlainSigmoid, class S>
  MANTISSA_HOST_DEVICE static Slope<S> at(S x) {
    const S half = static_cast<S>(0.5), root_half = static_cast<S>(1.0 / std::numbers::sqrt2);
    const S density = static_cast<S>(std::numbers::inv_sqrtpi / std::numbers::sqrt2) * std::exp(-half * x * x);
    const S phi = half * (S{1} + std::erf(x * root_half));
    return {x * phi, phi + x * density};
  }
};

}  // namespace mantissa
