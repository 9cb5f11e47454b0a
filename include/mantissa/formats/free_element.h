// Element formats of any width, for research: eXmY has a sign, X exponent bits with bias 2^(X-1) - 1, Y mantissa bits, and subnormals. All
// codes are numbers, as in OCP's formats of six and four bits; but e4m3 and e5m2 are OCP's, which keep codes for NaN and Inf: their largest
// are 448 and 57344. There are no codes here, only the values that they would stand for (free_rounding.h).
#pragma once

#include <cstdint>

#include "mantissa/formats/block_scale.h"

namespace mantissa {

enum class Rounding : uint8_t { nearest, stochastic };

struct FreeElement {
  static constexpr int32_t kMostExponentBits = 7, kMostMantissaBits = 7;  // a bf16 has no more mantissa

  int32_t exponent_bits = 0, mantissa_bits = 0;  // exponent_bits 0: none

  bool operator==(const FreeElement& other) const = default;
  explicit operator bool() const { return exponent_bits > 0; }
  int32_t bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t max_code() const {
    const uint32_t all = (1U << (exponent_bits + mantissa_bits)) - 1U;
    const FreeElement e4m3{4, 3}, e5m2{5, 2};
    return *this == e4m3 ? E4M3::max_code : *this == e5m2 ? E5M2::max_code : all;
  }
  ElementFacts facts() const {
    const uint32_t fraction = max_code() & ((1U << mantissa_bits) - 1U);
    return {mantissa_bits, static_cast<int32_t>(max_code() >> mantissa_bits) - bias(), fraction << (23 - mantissa_bits)};
  }
};

}  // namespace mantissa
