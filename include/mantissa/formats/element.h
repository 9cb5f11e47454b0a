// The element formats of block-scaled tensors, integer-only: an element is sign | exponent | mantissa with subnormals, and stands for
// itself times its block's scale 2^(s - 127), s an E8M0 code (0..254; 255 is NaN). Values go in and out as fp32 bits, so no floating-point
// state of the thread or the compiler can change a result. Adding a format is one `using` line at the end.
#pragma once

#include <cstdint>

#include "mantissa/base/host_device.h"
#include "mantissa/formats/bf16.h"

namespace mantissa {

constexpr uint32_t kFp32Sign = 0x80000000U, kFp32Inf = 0x7F800000U, kFp32Nan = 0x7FC00000U, kFp32HiddenBit = 0x00800000U;
constexpr uint8_t kScaleNan = 255;

// significand / 2^shift, round to nearest, ties to even. significand < 2^24, so any shift from 25 on gives 0; shift > 0.
MANTISSA_HOST_DEVICE inline uint32_t shift_right_to_nearest_even(uint32_t significand, int32_t shift) {
  const int32_t by = shift < 25 ? shift : 25;
  const uint32_t below_half = (1U << (by - 1)) - 1U, odd = (significand >> by) & 1U;
  return (significand + below_half + odd) >> by;
}

// kMax is the code of the largest finite magnitude. Magnitude codes above it are NaN, except the first where the all-ones exponent is
// reserved as in IEEE 754: that one is Inf, read but never written.
template <int kExponent, int kMantissa, uint32_t kMax>
struct Element {
  static constexpr int32_t exponent_bits = kExponent, mantissa_bits = kMantissa, bits = 1 + kExponent + kMantissa;
  static constexpr int32_t bias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t sign_bit = 1U << (kExponent + kMantissa), magnitude_mask = sign_bit - 1U;
  static constexpr uint32_t max_code = kMax, nan_code = magnitude_mask;  // without a NaN, nan_code is the largest magnitude
  static constexpr bool has_nan = max_code < magnitude_mask;
  static constexpr bool has_inf = (max_code >> kMantissa) < (1U << kExponent) - 1U;
  static constexpr uint32_t mantissa_mask = (1U << kMantissa) - 1U;
  static constexpr int32_t emax = static_cast<int32_t>(max_code >> kMantissa) - bias;       // exponent of the largest finite
  static constexpr uint32_t max_fraction = (max_code & mantissa_mask) << (23 - kMantissa);  // its fraction, as an fp32 mantissa
  static constexpr uint32_t poison_code = has_nan ? nan_code : 0U;                          // every code of a block with scale 255
  static constexpr int32_t codes_per_byte = bits <= 4 ? 2 : 1;
  static constexpr bool two_levels = false;  // scales are E8M0 alone; see nvfp4.h

  // The element nearest to fp32 `x` times 2^(127 - scale), ties to even, saturating also for Inf; zeros keep their sign. NaN gives
  // nan_code without a sign. scale 0..254.
  MANTISSA_HOST_DEVICE static uint8_t encode(uint32_t x, uint8_t scale) {
    const uint32_t magnitude = x & ~kFp32Sign, sign = (x & kFp32Sign) != 0 ? sign_bit : 0U;
    if (magnitude >= kFp32Inf) return static_cast<uint8_t>(magnitude > kFp32Inf ? nan_code : sign | max_code);
    uint32_t significand = magnitude & (kFp32HiddenBit - 1U);
    auto exponent = static_cast<int32_t>(magnitude >> 23);
    if (exponent > 0) {
      significand |= kFp32HiddenBit;
    } else {
      exponent = normalize(significand);
    }
    return static_cast<uint8_t>(sign | round(significand, exponent - scale));
  }

  // The fp32 bits of element * 2^(scale - 127): exact, or Inf where it exceeds fp32.
  MANTISSA_HOST_DEVICE static uint32_t decode(uint8_t code, uint8_t scale) {
    static_assert(bias - 1 + kMantissa + 127 <= 149, "the smallest element at scale code 0 would round");
    const uint32_t magnitude = code & magnitude_mask, sign = (code & sign_bit) != 0 ? kFp32Sign : 0U;
    if (scale == kScaleNan || magnitude > max_code + (has_inf ? 1U : 0U)) return kFp32Nan;
    if (magnitude == 0) return sign;
    uint32_t significand = 0;
    const int32_t exponent = split(magnitude, significand) + scale;  // biased exponent of fp32
    if (magnitude > max_code || exponent >= 255) return sign | kFp32Inf;
    if (exponent < 1) return sign | significand >> (1 - exponent);
    return sign | (static_cast<uint32_t>(exponent) << 23) | (significand & (kFp32HiddenBit - 1U));
  }

  // Like decode(), rounded to bf16: once, because decode() does not round.
  MANTISSA_HOST_DEVICE static uint16_t decode_bf16(uint8_t code, uint8_t scale) { return bf16_bits_from_fp32_bits(decode(code, scale)); }

  // The code at scale `to` of the element that `code` is at scale `from`: encode(decode(code, from), to) wherever that decodes to a finite
  // value. from, to 0..254.
  MANTISSA_HOST_DEVICE static uint8_t shift(uint8_t code, uint8_t from, uint8_t to) {
    const uint32_t magnitude = code & magnitude_mask, sign = code & sign_bit;
    if (magnitude > max_code + (has_inf ? 1U : 0U)) return static_cast<uint8_t>(nan_code);
    if (magnitude > max_code) return static_cast<uint8_t>(sign | max_code);
    if (magnitude == 0) return code & static_cast<uint8_t>(sign_bit);
    uint32_t significand = 0;
    const int32_t exponent = split(magnitude, significand);
    return static_cast<uint8_t>(sign | round(significand, exponent + from - to));
  }

 private:
  // Makes the leading bit of a subnormal fp32's significand the hidden bit; returns the biased exponent that goes with it. 0 stays 0.
  MANTISSA_HOST_DEVICE static int32_t normalize(uint32_t& significand) {
    int32_t exponent = 1;
    for (int32_t step = 16; step > 0; step /= 2) {
      if (significand < kFp32HiddenBit >> (step - 1)) {
        significand <<= step;
        exponent -= step;
      }
    }
    return exponent;
  }

  // A non-zero finite magnitude code as significand / 2^23 * 2^exponent with significand in [2^23, 2^24); returns the exponent.
  MANTISSA_HOST_DEVICE static int32_t split(uint32_t magnitude, uint32_t& significand) {
    const uint32_t field = magnitude >> kMantissa;
    significand = (magnitude & mantissa_mask) << (23 - kMantissa);
    if (field > 0) {
      significand |= kFp32HiddenBit;
      return static_cast<int32_t>(field) - bias;
    }
    return normalize(significand) - bias;
  }

  // The magnitude code nearest to significand / 2^23 * 2^exponent; significand in [2^23, 2^24), or 0. Below the smallest normal all
  // elements share its grid; a carry out of the mantissa moves into the exponent by itself.
  MANTISSA_HOST_DEVICE static uint32_t round(uint32_t significand, int32_t exponent) {
    const int32_t binade = exponent > 1 - bias ? exponent : 1 - bias;
    const uint32_t rounded = shift_right_to_nearest_even(significand, 23 - kMantissa + binade - exponent);
    const uint32_t code = (static_cast<uint32_t>(binade + bias - 1) << kMantissa) + rounded;
    return code < max_code ? code : max_code;
  }
};

using E4M3 = Element<4, 3, 0x7E>;
using E5M2 = Element<5, 2, 0x7B>;
using E2M1 = Element<2, 1, 0x7>;

}  // namespace mantissa
