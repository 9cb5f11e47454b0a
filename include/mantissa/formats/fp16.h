// IEEE binary16, which only files hold: nothing but its value is ever needed here. Integer-only, for host and device.
#pragma once

#include <cstdint>

#include "mantissa/base/host_device.h"

namespace mantissa {

// Exact. Subnormals have a leading bit in fp32; NaN keeps its payload.
MANTISSA_HOST_DEVICE inline uint32_t fp32_bits_from_fp16_bits(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16, exponent = (half >> 10) & 0x1FU;
  uint32_t fraction = half & 0x3FFU;
  if (exponent == 0x1FU) return sign | 0x7F800000U | (fraction << 13);
  if (exponent > 0) return sign | ((exponent + 112U) << 23) | (fraction << 13);
  if (fraction == 0) return sign;
  uint32_t scale = 113;
  for (; (fraction & 0x400U) == 0; fraction <<= 1) --scale;
  return sign | (scale << 23) | ((fraction & 0x3FFU) << 13);
}

}  // namespace mantissa
