// bfloat16: the upper 16 bits of an IEEE binary32. Integer-only, for host and device.
#pragma once

#include <cstdint>

#include "mantissa/base/host_device.h"

namespace mantissa {

struct bf16 {
  uint16_t bits = 0;
};

// fp32 bits to bf16 bits, round to nearest, ties to even. NaN stays NaN (quiet, sign kept); values past the largest finite become Inf.
MANTISSA_HOST_DEVICE inline uint16_t bf16_bits_from_fp32_bits(uint32_t bits) {
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return static_cast<uint16_t>((bits >> 16) | 0x0040U);
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

MANTISSA_HOST_DEVICE inline bf16 to_bf16(float value) { return bf16{bf16_bits_from_fp32_bits(__builtin_bit_cast(uint32_t, value))}; }

// Rounds away from zero with the probability (|value| - lower neighbor) / step, to 2^-16 for a uniform `random` of 16 bits, else toward
// zero: so the mean is the value. NaN stays NaN, and beyond the largest finite number there is Inf.
MANTISSA_HOST_DEVICE inline bf16 to_bf16_at_random(float value, uint32_t random) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7FFFFFFFU) >= 0x7F800000U) return to_bf16(value);
  return bf16{static_cast<uint16_t>((bits + (random & 0xFFFFU)) >> 16)};
}

MANTISSA_HOST_DEVICE inline float to_float(bf16 value) { return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16); }

}  // namespace mantissa
