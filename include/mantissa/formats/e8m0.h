// The scales of E8M0 as numbers of fp32, by their bits: code c is 2^(c - 127), 255 is NaN. 2^-127 is subnormal in fp32.
#pragma once

#include "mantissa/formats/element.h"

namespace mantissa {

inline constexpr uint32_t kLeastScaleBits = kFp32HiddenBit >> 1U;  // fp32 bits of 2^-127

MANTISSA_HOST_DEVICE inline uint32_t fp32_bits_of_e8m0(uint8_t code) {
  return code == kScaleNan ? kFp32Nan : code == 0 ? kLeastScaleBits : static_cast<uint32_t>(code) << 23U;
}

// Returns kScaleNan for what is no power of two, or none that E8M0 has.
MANTISSA_HOST_DEVICE inline uint8_t e8m0_of_fp32_bits(uint32_t bits) {
  if (bits == kLeastScaleBits) return 0;
  const uint32_t code = bits >> 23U;
  const bool none = (bits & (kFp32HiddenBit - 1U)) != 0 || code == 0 || code > kScaleNan;
  return none ? uint8_t{kScaleNan} : static_cast<uint8_t>(code);
}

}  // namespace mantissa
