// One source for fp32, bf16 and fp64: a kernel is a template on the type of its values, computes in Arithmetic<T>, and is chosen once per
// call.
#pragma once

#include <bit>
#include <utility>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// The type in which values of type T are computed and accumulated, and that of the statistics that go with them.
template <class T>
using Arithmetic = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline float load(float value) { return value; }
inline float load(bf16 value) { return to_float(value); }
inline double load(double value) { return value; }

// Rounds to the nearest T, ties to even.
template <class T>
T store(float value) {
  return static_cast<T>(value);
}
template <>
inline bf16 store<bf16>(float value) {
  return to_bf16(value);
}
template <class T>
T store(double value) {
  return static_cast<T>(value);
}
// Rounds through fp32, to odd (Boldo and Melquiond 2008), so that rounding twice gives what rounding once would.
template <>
inline bf16 store<bf16>(double value) {
  const float nearest = static_cast<float>(value);
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const double difference = value - static_cast<double>(nearest);
  if (difference != 0.0 && difference == difference && (bits & 1U) == 0) {
    const bool away_from_zero = (difference > 0.0) == (value > 0.0);
    bits = away_from_zero ? bits + 1 : bits - 1;
  }
  return bf16{bf16_bits_from_fp32_bits(bits)};
}

// Calls body.template operator()<T>() with the C++ type of a floating dtype.
template <class Body>
void with_values(Dtype dtype, Body&& body) {
  switch (dtype) {
    case Dtype::f32: return body.template operator()<float>();
    case Dtype::bf16: return body.template operator()<bf16>();
    case Dtype::f64: return body.template operator()<double>();
    case Dtype::i32:
    case Dtype::u8: break;
  }
  fail(ExitCode::internal, "kernel of the CPU: values must be fp32, bf16 or fp64, got ", dtype);
}

// Like with_values(), but for fp32 and bf16, which are all that the fast kernels compute.
template <class Body>
void with_narrow_values(Dtype dtype, Body&& body) {
  dtype == Dtype::f32 ? body.template operator()<float>() : body.template operator()<bf16>();
}

}  // namespace mantissa
