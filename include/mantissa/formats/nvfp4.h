// NVFP4: blocks of 16 elements of E2M1, each with a scale of E4M3, under one scale for the tensor. The element and the block's scale are
// those of NVIDIA's NVFP4; the scale of the tensor is a power of two here, 2^exponent. So every value, element * scale * 2^exponent, is a
// number of bf16, and servers that multiply by the tensor's scale, divide by its inverse, or apply it to a sum get the same bits.
// Integer-only, like element.h.
#pragma once

#include "mantissa/formats/element.h"

namespace mantissa {

inline constexpr int64_t kNvfp4Block = 16;
inline constexpr int kMostTensorExponent = 60;  // and its negative is the least: then no product leaves the normal numbers of bf16

// The codes are those of E2M1; scale codes are E4M3, of which NaN stands for a block that holds no numbers.
struct Nvfp4 {
  static constexpr int32_t exponent_bits = E2M1::exponent_bits, mantissa_bits = E2M1::mantissa_bits, bits = E2M1::bits;
  static constexpr uint32_t sign_bit = E2M1::sign_bit, magnitude_mask = E2M1::magnitude_mask, max_code = E2M1::max_code;
  static constexpr uint32_t poison_code = E2M1::poison_code;
  static constexpr int32_t codes_per_byte = E2M1::codes_per_byte;
  static constexpr bool has_nan = false, has_inf = false, two_levels = true;
  static constexpr uint8_t least_scale = 1, most_scale = E4M3::max_code, nan_scale = E4M3::nan_code;

  // The scale nearest to amax / 6 / 2^exponent, ties to even, from 2^-9 to 448, for fp32 bits `amax`, sign clear. Inf and NaN give NaN.
  MANTISSA_HOST_DEVICE static uint8_t scale(uint32_t amax, int32_t exponent) {
    if (amax >= kFp32Inf) return nan_scale;
    const auto binade = static_cast<int32_t>(amax >> 23);
    if (binade < 127 + exponent - 8) return least_scale;  // the next scale begins at 9 * 2^(exponent - 9)
    // A sixth of the significand, with more digits than fp32 has: what is cut off stays as a last digit, which decides ties.
    const uint32_t significand = (amax & (kFp32HiddenBit - 1U)) | kFp32HiddenBit, sixth = (significand << 5) / 3;
    const int32_t shift = sixth >> 27 != 0 ? 4 : 3;
    const bool cut = (significand << 5) != sixth * 3 || (sixth & ((1U << shift) - 1U)) != 0;
    const uint32_t digits = sixth >> shift | (cut ? 1U : 0U);
    const uint32_t quotient = static_cast<uint32_t>(binade - 6 + shift) << 23 | (digits & (kFp32HiddenBit - 1U));
    const uint8_t code = E4M3::encode(quotient, static_cast<uint8_t>(127 + exponent));
    return code < least_scale ? least_scale : code;
  }

  // The element nearest to fp32 `x` / (scale * 2^exponent), ties to even, saturating; zeros keep their sign. The scale is a positive
  // number.
  MANTISSA_HOST_DEVICE static uint8_t encode(uint32_t x, uint8_t scale, int32_t exponent) {
    int32_t binade = 0;
    const uint32_t n = significand_of(scale, binade), magnitude = x & ~kFp32Sign;
    const auto field = static_cast<int32_t>(magnitude >> 23);
    const uint32_t significand = (magnitude & (kFp32HiddenBit - 1U)) | (field > 0 ? kFp32HiddenBit : 0U);
    // |x| in quarters of the scale's last digit, doubled, with a last digit for what is cut off: so thresholds are whole numbers.
    const int32_t shift = (field > 0 ? field : 1) - 150 - (binade - 2 + exponent);
    uint32_t twice = 2 * 512;  // beyond all thresholds
    if (shift < -31) {
      twice = significand != 0 ? 1U : 0U;
    } else if (shift < -14) {
      twice = 2 * (significand >> -shift) | ((significand & ((1U << -shift) - 1U)) != 0 ? 1U : 0U);
    }
    constexpr uint32_t kMidpoints[7] = {1, 3, 5, 7, 10, 14, 20};  // in quarters; a tie goes up from an odd code
    uint32_t code = 0;
    for (uint32_t i = 0; i < 7; ++i) code += twice > 2 * kMidpoints[i] * n - i % 2 ? 1U : 0U;
    return static_cast<uint8_t>(code | ((x & kFp32Sign) != 0 ? sign_bit : 0U));
  }

  // fp32 bits of element * scale * 2^exponent, which bf16 holds exactly; NaN where the scale is.
  MANTISSA_HOST_DEVICE static uint32_t decode(uint8_t code, uint8_t scale, int32_t exponent) {
    if ((scale & E4M3::magnitude_mask) == nan_scale) return kFp32Nan;
    const uint32_t m = code & magnitude_mask, halves = m < 2 ? m : (2U | (m & 1U)) << ((m >> 1) - 1U);
    int32_t binade = 0;
    uint32_t product = halves * significand_of(scale, binade);  // below 256
    const uint32_t sign = ((code & sign_bit) != 0) != ((scale & E4M3::sign_bit) != 0) ? kFp32Sign : 0U;
    if (product == 0) return sign;
    binade += exponent - 1;
    for (int32_t step = 4; step > 0; step /= 2) {
      if (product < 256U >> step) product <<= step, binade -= step;
    }
    return sign | static_cast<uint32_t>(127 + 7 + binade) << 23 | (product & 127U) << 16;
  }

  // The scales of which mse takes the one with the least squared error, of equal errors the smallest, for an amax that is a number: one
  // code below the nearest scale, where elements are clipped, to five above it, as long as the largest element becomes a 4 or a 6. Values
  // of a block at one of these scales have that scale among their candidates again. Below 2^(exponent - 8) the grid of the least scale
  // holds those of all others, so nothing is to be searched.
  struct Candidates {
    uint8_t first, last;
  };
  MANTISSA_HOST_DEVICE static Candidates candidates(uint32_t amax, int32_t exponent) {
    const int32_t near = scale(amax, exponent), above = near + 5, below = near - 1;
    if (static_cast<int32_t>(amax >> 23) < 127 + exponent - 8) return {least_scale, least_scale};
    const auto first = static_cast<uint8_t>(below < least_scale ? least_scale : below);
    auto last = static_cast<uint8_t>(above > most_scale ? most_scale : above);
    while (last > first && encode(amax, last, exponent) < 6) --last;  // the code of 4
    return {first, last};
  }

  // The squared error of an element, as fp32 bits, at one of these scales: exact, in units of 2^-40 of the square of amax's binade, once
  // the element is cut off below 2^-20 of it. Sums of a block stay below 2^53.
  static constexpr int32_t kErrorDigits = 20;
  MANTISSA_HOST_DEVICE static int64_t squared_error(uint32_t x, uint32_t amax, uint8_t scale, int32_t exponent) {
    const auto unit = static_cast<int32_t>(amax >> 23) - kErrorDigits;
    const int64_t error = in_units(x & ~kFp32Sign, unit) - in_units(decode(encode(x & ~kFp32Sign, scale, exponent), scale, exponent), unit);
    return error * error;
  }

  // The scale of a block under mse; sum(scale) is its squared error at one of the candidates.
  template <class Sum>
  MANTISSA_HOST_DEVICE static uint8_t searched_scale(uint32_t amax, int32_t exponent, const Sum& sum) {
    if (amax >= kFp32Inf) return nan_scale;
    const Candidates of = candidates(amax, exponent);
    uint8_t best = of.first;
    if (of.first == of.last) return best;
    int64_t least = sum(best);
    for (int32_t scale = of.first + 1; scale <= of.last; ++scale) {
      const int64_t error = sum(static_cast<uint8_t>(scale));
      if (error < least) least = error, best = static_cast<uint8_t>(scale);
    }
    return best;
  }

 private:
  // A number in whole units of 2^(unit - 127), the rest of which is cut off.
  MANTISSA_HOST_DEVICE static int64_t in_units(uint32_t number, int32_t unit) {
    const auto field = static_cast<int32_t>(number >> 23);
    const int64_t significand = (number & (kFp32HiddenBit - 1U)) | (field > 0 ? kFp32HiddenBit : 0U);
    const int32_t shift = (field > 0 ? field : 1) - 23 - unit;
    return shift >= 0 ? significand << shift : shift > -32 ? significand >> -shift : 0;
  }

  // A scale as significand * 2^binade.
  MANTISSA_HOST_DEVICE static uint32_t significand_of(uint8_t scale, int32_t& binade) {
    const uint32_t field = (scale & E4M3::magnitude_mask) >> 3;
    binade = (field > 0 ? static_cast<int32_t>(field) : 1) - 10;
    return (scale & 7U) | (field > 0 ? 8U : 0U);
  }
};

}  // namespace mantissa
