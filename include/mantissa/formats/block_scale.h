// Scales and codes of one block: the scale that follows from the block's amax, and encoding and decoding under the rules for
// non-finite blocks. Integer-only, like element.h. Formulas: OCP Microscaling Formats v1.0 (floor), Transformer Engine and cuBLAS (rceil),
// compressed-tensors `utils/mxfp_utils.py` (even), torchao `ScaleCalculationMode` (ceil), FlashInfer >= 0.3.1 `fp4_quantize` with UE8M0
// scales and `mxfp4_dequantize_host` (flashinfer; its bf16 input is rounded by the caller). mse is this project's.
#pragma once

#include <cstdint>

#include "mantissa/base/host_device.h"
#include "mantissa/formats/element.h"
#include "mantissa/formats/format.h"
#include "mantissa/formats/nvfp4.h"

namespace mantissa {

// The amax of a block is the unsigned maximum of its elements' keys, in any order. It starts at 0, which means that no element took part.
// Under flashinfer NaN elements take no part.
MANTISSA_HOST_DEVICE inline uint32_t amax_key(uint32_t x, ScaleRule rule) {
  const uint32_t magnitude = x & ~kFp32Sign;
  return rule == ScaleRule::flashinfer && magnitude > kFp32Inf ? 0U : magnitude + 1U;
}

// fp32 bits of the amax behind the largest key; NaN if no element took part.
MANTISSA_HOST_DEVICE inline uint32_t amax_of_key(uint32_t key) { return key == 0 ? kFp32Nan : key - 1U; }

// Facts of an element format that a scale rule reads; the fraction is that of the largest element, as an fp32 mantissa.
struct ElementFacts {
  int32_t mantissa_bits, emax;
  uint32_t max_fraction;
};
template <class E>
MANTISSA_HOST_DEVICE constexpr ElementFacts facts_of() {
  return {E::mantissa_bits, E::emax, E::max_fraction};
}

// Returns the largest fraction of amax, in fp32 bits, for which the scale is 2^(floor(log2 amax) - emax). Above it the scale is twice that.
MANTISSA_HOST_DEVICE constexpr uint32_t largest_kept_fraction(ElementFacts of, ScaleRule rule) {
  switch (rule) {
    case ScaleRule::floor: return kFp32HiddenBit - 1U;
    case ScaleRule::even: return kFp32HiddenBit - (1U << (22 - of.mantissa_bits)) - 1U;
    case ScaleRule::ceil: return 0U;
    case ScaleRule::mse: return of.max_fraction + (1U << (22 - of.mantissa_bits));  // half a step beyond the largest element
    case ScaleRule::rceil:
    case ScaleRule::nearest:
    case ScaleRule::flashinfer: break;
  }
  return of.max_fraction;
}

template <class E>
MANTISSA_HOST_DEVICE constexpr uint32_t largest_kept_fraction(ScaleRule rule) {
  return largest_kept_fraction(facts_of<E>(), rule);
}

// Clamps the scale of a block of numbers.
MANTISSA_HOST_DEVICE inline uint8_t clamped_scale(int32_t scale, ScaleRange range) {
  return scale < range.least ? range.least : scale > range.most ? range.most : static_cast<uint8_t>(scale);
}

// The scale code for fp32 bits `amax`, sign clear: for numbers the one that the rule gives (ScaleRule), clamped to the range; Inf and NaN
// give 255. Under mse amax decides for E4M3 and E5M2 only; see searches_scale(). flashinfer differs from rceil in two ways: Inf gives 254,
// and an amax below largest element * 2^-126 gives 0. Its range is the whole one.
MANTISSA_HOST_DEVICE inline uint8_t block_scale(uint32_t amax, ElementFacts of, ScaleRule rule, ScaleRange range = {}) {
  const uint32_t flushed_below = (static_cast<uint32_t>(of.emax + 1) << 23) | of.max_fraction;
  if (rule == ScaleRule::flashinfer && amax <= kFp32Inf && (amax == kFp32Inf || amax < flushed_below)) return amax == kFp32Inf ? 254 : 0;
  if (amax >= kFp32Inf) return kScaleNan;
  const uint32_t fraction = amax & (kFp32HiddenBit - 1U);
  const int32_t up = fraction > largest_kept_fraction(of, rule) ? 1 : 0;
  const int32_t scale = static_cast<int32_t>(amax >> 23) - of.emax + up;
  return clamped_scale(scale, range);
}

// NVFP4 has its own scales, of E4M3, and neither rules nor ranges of E8M0.
template <class E>
MANTISSA_HOST_DEVICE uint8_t block_scale(uint32_t amax, CodeRule rule, ScaleRange range = {}) {
  if constexpr (E::two_levels) {
    return E::scale(amax, rule.tensor_exponent);
  } else {
    return block_scale(amax, facts_of<E>(), rule.scale, range);
  }
}

// Returns true if all elements of a block decide about its scale: under mse, for E2M1 and NVFP4 (Nvfp4::searched_scale()).
//
// In E2M1, let 2^F be floor's scale. Finite elements of 2^(F+1) up to the largest of 2^F are also those of 2^F, and so on: so a larger
// scale is better only for what exceeds the largest element by more than half a step, and 2^(F+1), beyond whose largest element nothing
// lies, is never worse than a larger one. E4M3 and E5M2 have so many binades that amax alone decides: 2^(F-1) clips it by an eighth or
// more, and beyond half a step the error that 2^F adds to amax exceeds all that its finer subnormals save. (With fp32 in blocks of more
// than 512 E4M3 elements that is not so for an amax within 2^-15 of the half step, relatively to a step; there the threshold is the
// definition.)
template <class E>
MANTISSA_HOST_DEVICE constexpr bool searches_scale(ScaleRule rule) {
  return rule == ScaleRule::mse && E::exponent_bits == 2;
}

// The squared errors of a block of E2M1 at half and at twice floor's scale 2^F, less that at 2^F: exact integers, in units of 2^-27 of the
// square of 2^F, so that their order does not matter. Squared errors are continuous in x and linear between grid points but for x^2, which
// cancels; with t = |x| / 2^F < 8 and positive parts (y)+
//
//   below = 2 (t - 7/2)+ + 4 (t - 5)+ - (1/8 - ||t - 1/2| - 1/4|)+ / 2
//   above = (1/4 - ||t - 1| - 1/2|)+ - 4 (t - 7)+
struct ScaleErrors {
  int64_t below = 0, above = 0;

  // Adds an element, as fp32 bits, of a block with this amax, sign clear. What is cut off below 2^-26 belongs to elements that are zero at
  // all three scales.
  MANTISSA_HOST_DEVICE void add(uint32_t x, uint32_t amax) {
    constexpr int64_t kOne = 1 << 26;
    const uint32_t magnitude = x & ~kFp32Sign, hidden = magnitude < kFp32HiddenBit ? 0U : kFp32HiddenBit;
    const uint32_t binades = (amax >> 23) - (hidden != 0 ? magnitude >> 23 : 1U);
    const int64_t t = binades < 32 ? (((magnitude & (kFp32HiddenBit - 1U)) | hidden) << 5) >> binades : 0;
    const auto positive = [](int64_t y) { return y > 0 ? y : int64_t{0}; };
    const auto distance = [](int64_t a, int64_t b) { return a > b ? a - b : b - a; };
    below += 4 * positive(t - kOne * 7 / 2) + 8 * positive(t - 5 * kOne) - positive(kOne / 8 - distance(distance(t, kOne / 2), kOne / 4));
    above += 2 * positive(kOne / 4 - distance(distance(t, kOne), kOne / 2)) - 8 * positive(t - 7 * kOne);
  }
};

// The scale code of a block of E2M1 under mse, whose errors are those of all its elements. Like block_scale() otherwise.
template <class E>
MANTISSA_HOST_DEVICE uint8_t searched_scale(uint32_t amax, const ScaleErrors& errors, ScaleRange range) {
  if (amax >= kFp32Inf) return kScaleNan;
  const int32_t best = errors.below <= 0 && errors.below <= errors.above ? -1 : errors.above < 0 ? 1 : 0;
  return clamped_scale(static_cast<int32_t>(amax >> 23) - E::emax + best, range);
}

// The code of fp32 `x` in a block of this scale. A block with scale 255 is poisoned: except under flashinfer it holds no numbers, whatever
// x is. Under flashinfer, NaN, Inf and all of a block with scale 255 give nan_code without a sign, and elements become zero that are
// subnormal or in a block of scale 0 or 254.
template <class E>
MANTISSA_HOST_DEVICE uint8_t encode_in_block(uint32_t x, uint8_t scale, CodeRule rule) {
  if constexpr (E::two_levels) {
    return scale == E::nan_scale ? static_cast<uint8_t>(E::poison_code) : E::encode(x, scale, rule.tensor_exponent);
  } else {
    if (rule.scale != ScaleRule::flashinfer) return scale == kScaleNan ? static_cast<uint8_t>(E::poison_code) : E::encode(x, scale);
    const uint32_t magnitude = x & ~kFp32Sign;
    if (magnitude >= kFp32Inf || scale == kScaleNan) return static_cast<uint8_t>(E::nan_code);
    const bool flushed = magnitude < kFp32HiddenBit || scale == 0 || scale == 254;
    return E::encode(flushed ? x & kFp32Sign : x, scale);
  }
}

// fp32 bits of what a code stands for: element * 2^(scale - 127), exact or Inf; NaN at scale 255. Under flashinfer -0 decodes to +0. Of
// NVFP4 that of Nvfp4::decode().
template <class E>
MANTISSA_HOST_DEVICE uint32_t decode_in_block(uint8_t code, uint8_t scale, CodeRule rule) {
  if constexpr (E::two_levels) {
    return E::decode(code, scale, rule.tensor_exponent);
  } else {
    return E::decode(rule.scale == ScaleRule::flashinfer && code == E::sign_bit ? uint8_t{0} : code, scale);
  }
}

template <class E>
MANTISSA_HOST_DEVICE uint16_t decode_in_block_bf16(uint8_t code, uint8_t scale, CodeRule rule) {
  return bf16_bits_from_fp32_bits(decode_in_block<E>(code, scale, rule));
}

// The code at scale `to` of the element that `code` is at scale `from`: that of encode_in_block() for its fp32 value, except under
// flashinfer.
template <class E>
MANTISSA_HOST_DEVICE uint8_t shift_in_block(uint8_t code, uint8_t from, uint8_t to) {
  return to == kScaleNan ? static_cast<uint8_t>(E::poison_code) : E::shift(code, from, to);
}

// Returns true if an element of a block with this scale could be subnormal or Inf as bf16: hardware that flushes subnormals, or rounds,
// then gives a wrong GEMM. Blocks of zeros have the least scale and are harmless; the caller looks at their codes.
template <class E>
MANTISSA_HOST_DEVICE bool extreme_scale(uint8_t scale) {
  if constexpr (E::two_levels) {
    return false;
  } else {
    return scale < E::bias + E::mantissa_bits || scale > 254 - E::emax;
  }
}

}  // namespace mantissa
