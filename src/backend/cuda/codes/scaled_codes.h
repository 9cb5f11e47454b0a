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
// 2^(127 - scale), scale 0..253, or NaN, with which every element becomes the NaN of its format. No bf16 in a block has a larger scale,
// but for an Inf under flashinfer.
__device__ inline float inverse_of(uint32_t scale, bool is_nan) {
  return is_nan ? __builtin_bit_cast(float, kFp32Nan) : __builtin_bit_cast(float, (254U - scale) << 23);
}

// The scales that are not extreme_scale().
template <class E>
constexpr uint32_t kLeastScale = E::bias + E::mantissa_bits;
template <class E>
constexpr uint32_t kMostScale = 254 - E::emax;

// E2M1 has steps of 1/2 below 2, of 1 below 4 and of 2 below 6. A sum with a power of two whose last bit is a step rounds to it, to nearest
// and ties to even, and ends in the number of steps.
__device__ inline uint32_t encode_e2m1(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const float given = __builtin_bit_cast(float, bits & ~kFp32Sign), magnitude = given < 6.0F ? given : 6.0F;
  const float rounder = magnitude < 2.0F ? 0x1p22F : magnitude < 4.0F ? 0x1p23F : 0x1p24F;
  const uint32_t code_of_zero_steps = magnitude < 2.0F ? 0 : magnitude < 4.0F ? 2 : 4;
  return ((__builtin_bit_cast(uint32_t, magnitude + rounder) & 7U) + code_of_zero_steps) | (bits >> 28 & 8U);
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
  if constexpr (std::is_same_v<E, E2M1>) {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.put(i, encode_e2m1(scaled(i)));
    if (inverses[0] != inverses[0]) out = {};
  } else {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; i += 4) out.words[i / 4] = encode_fp8<E>(scaled(i), scaled(i + 1), scaled(i + 2), scaled(i + 3));
  }
  return out;
}
template <class E>
__device__ inline PackOfCodes<E> encoded(const Words& words, float inverse) {
  return encoded<E>(words, {inverse, inverse, inverse, inverse, inverse, inverse, inverse, inverse});
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
  float inverse;
};
template <class E, bool kFlashinfer>
__device__ inline ScaleOfBlock scale_of_half(const AmaxRule& rule, uint32_t key) {
  const uint32_t amax = amax_of_half<kFlashinfer>(key), code = kFlashinfer ? block_scale<E>(amax, ScaleRule::flashinfer) : rule.scale(amax);
  return {code, inverse_of(code, amax >= kFp32Inf)};
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
  if constexpr (std::is_same_v<E, E2M1>) {  // the fields where fp32 has them are the element times 2^-126
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
