// Codes of packs by multiplication and by the chip's conversions: a few instructions an element, where the integers of formats/element.h
// take some forty. They have the same bits for bf16 in blocks that it may be in, except where a function says otherwise.
#pragma once

#include "backend/cuda/codes/packs.h"
#include "mantissa/formats/block_scale.h"

namespace mantissa::gpu {

// Eight values of bf16, two in a word.
using Words = PackInMemory<bf16>;
inline constexpr uint32_t kMagnitudes = 0x7fff7fffU;  // both halves without signs
__device__ inline float low_value(uint32_t two) { return __builtin_bit_cast(float, two << 16); }
__device__ inline float high_value(uint32_t two) { return __builtin_bit_cast(float, two & 0xffff0000U); }

// The codes of a pack, in order: one byte each, or two in a byte.
template <class E>
struct alignas(kPack / E::codes_per_byte) PackOfCodes {
  static constexpr unsigned kBits = 8 / E::codes_per_byte, kWords = 2 / E::codes_per_byte, kInWord = kPack / kWords;
  uint32_t words[kWords];

  __device__ void put(unsigned i, uint32_t code) { words[i / kInWord] |= code << (i % kInWord * kBits); }
  __device__ uint8_t at(unsigned i) const {
    return static_cast<uint8_t>(words[i / kInWord] >> (i % kInWord * kBits) & (0xffU >> (8 - kBits)));
  }
};

// 2^(scale - 127), scale 0..254.
__device__ inline float power_of(uint32_t scale) {
  return __builtin_bit_cast(float, Largest<uint32_t>()(scale << 23, kFp32HiddenBit >> 1));
}
// The factor that encoded() takes of a scale: for codes of a byte 2^(127 - scale), scale 0..253, or NaN, with which every element becomes
// the NaN of its format; of four bits the scale itself, or NaN. No bf16 in a block has a larger scale, but for an Inf under flashinfer.
template <class E>
__device__ inline float factor_of(uint32_t scale, bool is_nan) {
  if (is_nan) return __builtin_bit_cast(float, kFp32Nan);
  return E::codes_per_byte == 2 ? power_of(scale) : __builtin_bit_cast(float, (254U - scale) << 23);
}
// A scale of NVFP4 that is a number, times 2^exponent.
__device__ inline float number_of_nvfp4(uint32_t scale, int32_t exponent) {
  const float number = __builtin_bit_cast(float, (scale & E4M3::sign_bit) << 24 | (scale & E4M3::magnitude_mask) << 20) * 0x1p120F;
  return number * __builtin_bit_cast(float, static_cast<uint32_t>(127 + exponent) << 23);
}

// The scales that are not extreme_scale().
template <class E>
constexpr uint32_t kLeastScale = E::bias + E::mantissa_bits;
template <class E>
constexpr uint32_t kMostScale = 254 - E::emax;
template <>
inline constexpr uint32_t kLeastScale<Nvfp4> = 0;
template <>
inline constexpr uint32_t kMostScale<Nvfp4> = Nvfp4::most_scale;

// Codes of four bits count the midpoints between elements that a magnitude exceeds; a tie goes up from an odd code. bf16 holds midpoints:
// a half of magnitudes + beyond[i] has its first bit set where it exceeds number i. scale: of the block, all of it, as a number, or NaN.
template <class E>
__device__ inline PackOfCodes<E> encoded_by_midpoints(const Words& words, float scale) {
  constexpr float kMidpoints[7] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
  uint32_t beyond[7];
  MANTISSA_UNROLL
  for (unsigned i = 0; i < 7; ++i) {
    const uint32_t midpoint = __builtin_bit_cast(uint32_t, scale * kMidpoints[i]) >> 16;
    beyond[i] = (i % 2 == 0 ? 0x7fff7fffU : 0x80008000U) - midpoint * 0x10001U;
  }
  PackOfCodes<E> out{};
  MANTISSA_UNROLL
  for (unsigned w = 0; w < kPack / 2; ++w) {
    const uint32_t two = words.words[w], m = two & kMagnitudes;
    const uint32_t fours = m + beyond[3], twos = (m + beyond[1]) ^ fours ^ (m + beyond[5]),
                   ones = (m + beyond[0]) ^ (m + beyond[2]) ^ (m + beyond[4]) ^ (m + beyond[6]) ^ twos;
    const auto bits = [](uint32_t mask, uint32_t first, uint32_t rest) { return (first & mask) | (rest & ~mask); };
    const uint32_t codes = bits(0xe000e000U, bits(0xc000c000U, bits(0x80008000U, two, fours >> 1), twos >> 2), ones >> 3);
    out.put(2 * w, codes >> 12 & 15U), out.put(2 * w + 1, codes >> 28);
  }
  return scale == scale ? out : PackOfCodes<E>{};
}

// Encodes each element like encode_in_block(), by the inverses of its scales, all of which are NaN or none. Under flashinfer only in blocks
// that are_ordinary().
template <class E>
__device__ inline PackOfCodes<E> encoded(const Words& words, const float (&inverses)[kPack]) {
  PackOfCodes<E> out{};
  const auto scaled = [&](unsigned i) {
    const uint32_t two = words.words[i / 2];
    return (i % 2 == 0 ? low_value(two) : high_value(two)) * inverses[i];
  };
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; i += 4) out.words[i / 4] = encode_fp8<E>(scaled(i), scaled(i + 1), scaled(i + 2), scaled(i + 3));
  return out;
}
// factor: factor_of() the scale, or that of scale_of_nvfp4().
template <class E>
__device__ inline PackOfCodes<E> encoded(const Words& words, float factor) {
  if constexpr (E::codes_per_byte == 2)
    return encoded_by_midpoints<E>(words, factor);
  else
    return encoded<E>(words, {factor, factor, factor, factor, factor, factor, factor, factor});
}

// Orders the magnitudes of both halves by their largest: NaN is the largest or, where it takes no part, the least.
template <bool kFlashinfer>
__device__ inline uint32_t amax_keys(uint32_t two) {
  const uint32_t magnitudes = two & kMagnitudes;
  return kFlashinfer ? (magnitudes + 0x007f007fU) ^ 0x80008000U : magnitudes;
}
// The fp32 bits of the amax behind the largest key of a half.
template <bool kFlashinfer>
__device__ inline uint32_t amax_of_half(uint32_t key) {
  if (!kFlashinfer) return key << 16;
  return key < 0x8000U ? kFp32Nan : (key - 0x807fU) << 16;
}
// block_scale() of a rule that is told by its largest_kept_fraction(). What exceeds that fraction carries into the exponent.
struct AmaxRule {
  uint32_t largest_fraction;
  int32_t emax, least, most;

  template <class E>
  static AmaxRule of(ScaleRule rule, ScaleRange range) {
    return {largest_kept_fraction<E>(rule), E::emax, range.least, range.most};
  }
  __device__ uint32_t scale(uint32_t amax) const {
    const int32_t scale = static_cast<int32_t>((amax + (kFp32HiddenBit - 1U - largest_fraction)) >> 23) - emax;
    const int32_t clamped = scale < least ? least : scale > most ? most : scale;
    return amax >= kFp32Inf ? kScaleNan : static_cast<uint32_t>(clamped);
  }
};

struct ScaleOfBlock {
  uint32_t code;
  float factor;
};
template <class E, bool kFlashinfer>
__device__ inline ScaleOfBlock scale_of_half(const AmaxRule& rule, uint32_t key) {
  const uint32_t amax = amax_of_half<kFlashinfer>(key), code = kFlashinfer ? block_scale<E>(amax, ScaleRule::flashinfer) : rule.scale(amax);
  return {code, factor_of<E>(code, amax >= kFp32Inf)};
}
// Nvfp4::scale() of an amax of bf16. Six midpoints between scales are numbers of bf16, so that an amax is one of them, whose sixth this
// product gives exactly, or far from all.
__device__ inline ScaleOfBlock scale_of_nvfp4(uint32_t amax, int32_t exponent) {
  const auto sixth = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, 1.0F / 6.0F) - (static_cast<uint32_t>(exponent) << 23));
  const uint32_t code =
      Largest<uint32_t>()(encode_fp8<E4M3>(__builtin_bit_cast(float, amax) * sixth, 0.0F, 0.0F, 0.0F), Nvfp4::least_scale);
  if (amax >= kFp32Inf) return {Nvfp4::nan_scale, __builtin_bit_cast(float, kFp32Nan)};
  return {code, number_of_nvfp4(code, exponent)};
}
// Returns true if flashinfer's rule about what is no number, or flushed, changes no code of a pack: nothing that is subnormal reaches a
// quarter of 2^(3 - 127).
__device__ inline bool are_ordinary(const Words& words, uint32_t scale) {
  uint32_t keys = 0x80008000U;
  MANTISSA_UNROLL
  for (const uint32_t two : words.words) keys &= amax_keys<true>(two);
  return keys == 0x80008000U && scale - 3U <= 250U;
}

template <class E>
__device__ inline Pack elements_of(const PackOfCodes<E>& codes) {
  Pack out;
  if constexpr (E::codes_per_byte == 2) {  // the fields where fp32 has them are the element times 2^-126
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const uint32_t code = codes.words[0] >> (4 * i);
      out.at[i] = __builtin_bit_cast(float, (code & 8U) << 28 | (code & 7U) << 22) * 0x1p126F;
    }
  } else {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; i += 2)
      decode_fp8<E>(static_cast<uint16_t>(codes.words[i / 4] >> (i % 4 * 8)), out.at[i], out.at[i + 1]);
  }
  return out;
}
// Returns 0 if no code stands for NaN or Inf.
template <class E>
__device__ inline uint32_t nonfinite_bits(const PackOfCodes<E>& codes) {
  uint32_t beyond = 0;
  if constexpr (E::has_nan) {
    MANTISSA_UNROLL
    for (const uint32_t word : codes.words)
      beyond |= (word & E::magnitude_mask * 0x01010101U) + (E::magnitude_mask - E::max_code) * 0x01010101U;
  }
  return beyond & E::sign_bit * 0x01010101U;
}
template <class E>
__device__ inline bool any_nonzero(const PackOfCodes<E>& codes) {
  uint32_t magnitudes = 0;
  MANTISSA_UNROLL
  for (const uint32_t word : codes.words) magnitudes |= word & (E::codes_per_byte == 2 ? 0x77777777U : 0x7f7f7f7fU);
  return magnitudes != 0;
}

}  // namespace mantissa::gpu
