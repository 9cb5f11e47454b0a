// Codes of packs by multiplication and by the chip's conversions: a few instructions an element, where the integers of formats/element.h
// take some forty. They have the same bits wherever scales and elements are ordinary, which they ask first; else the integers decide.
#pragma once

#include "backend/cuda/codes/packs.h"
#include "mantissa/formats/block_scale.h"

namespace mantissa::gpu {

// The codes of a pack, in order: one byte each, or two in a byte.
template <class E>
struct PackOfCodes {
  static constexpr unsigned kBytes = kPack / E::codes_per_byte, kBits = 8 / E::codes_per_byte;
  using Bytes = std::conditional_t<kBytes == 8, uint64_t, uint32_t>;
  Bytes bytes = 0;

  __device__ void put(unsigned i, uint32_t code) { bytes |= Bytes{code} << (kBits * i); }
  __device__ uint8_t at(unsigned i) const { return static_cast<uint8_t>(bytes >> (kBits * i) & (0xffU >> (8 - kBits))); }
};
// Scales of a pack's elements.
struct PackOfScales {
  uint64_t bytes;

  __device__ static PackOfScales all(uint8_t scale) { return {scale * 0x0101010101010101U}; }
  __device__ uint8_t at(unsigned i) const { return static_cast<uint8_t>(bytes >> (8 * i)); }
};

// 2^(scale - 127), scale 0..254.
__device__ inline float power_of(uint32_t scale) {
  return __builtin_bit_cast(float, Largest<uint32_t>()(scale << 23, kFp32HiddenBit >> 1));
}

// Returns true if the power of two and its inverse are both normal numbers.
__device__ inline bool has_inverse(uint8_t scale) { return scale - 1U < 253U; }
__device__ inline bool is_normal_or_zero(float value) {
  const uint32_t magnitude = __builtin_bit_cast(uint32_t, value) & ~kFp32Sign;
  return magnitude == 0 || magnitude - kFp32HiddenBit < kFp32Inf - kFp32HiddenBit;
}

// E2M1 has steps of 1/2 below 2, of 1 below 4 and of 2 below 6. A sum with a power of two whose last bit is a step rounds to it, to nearest
// and ties to even, and ends in the number of steps.
__device__ inline uint32_t encode_e2m1(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  const float given = __builtin_bit_cast(float, bits & ~kFp32Sign), magnitude = given < 6.0F ? given : 6.0F;
  const float rounder = magnitude < 2.0F ? 0x1p22F : magnitude < 4.0F ? 0x1p23F : 0x1p24F;
  const uint32_t code_of_zero_steps = magnitude < 2.0F ? 0 : magnitude < 4.0F ? 2 : 4;
  return ((__builtin_bit_cast(uint32_t, magnitude + rounder) & 7U) + code_of_zero_steps) | (bits >> 28 & 8U);
}

template <class E>
__device__ inline PackOfCodes<E> encode_scaled(const Pack& pack, const PackOfScales& scales) {
  PackOfCodes<E> out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; i += 2) {
    const float low = pack.at[i] * power_of(254U - scales.at(i)), high = pack.at[i + 1] * power_of(254U - scales.at(i + 1));
    if constexpr (std::is_same_v<E, E2M1>) {
      out.put(i, encode_e2m1(low) | encode_e2m1(high) << 4);
    } else {
      out.put(i, encode_fp8<E>(low, high));
    }
  }
  return out;
}

// Encodes each element like encode_in_block(), in blocks that it may be in: the scale of a block with a NaN is 255, except under
// flashinfer.
template <class E>
__device__ inline PackOfCodes<E> encoded(const Pack& pack, const PackOfScales& scales, ScaleRule rule) {
  bool ordinary = true;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i)
    ordinary = ordinary && has_inverse(scales.at(i)) && (rule != ScaleRule::flashinfer || is_normal_or_zero(pack.at[i]));
  if (ordinary) return encode_scaled<E>(pack, scales);
  PackOfCodes<E> out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) out.put(i, encode_in_block<E>(__builtin_bit_cast(uint32_t, pack.at[i]), scales.at(i), rule));
  return out;
}

// The fields of a code where fp32 has them are the element times 2^(bias - 127).
template <class E>
__device__ inline float decode_scaled(uint32_t code, uint32_t scale) {
  const uint32_t bits = (code & E::sign_bit) << (32 - E::bits) | (code & E::magnitude_mask) << (23 - E::mantissa_bits);
  return __builtin_bit_cast(float, bits) * power_of(254U - E::bias) * power_of(scale);
}

// Decodes each code like decode_in_block(). extreme becomes true if an element that is not zero has an extreme scale; it never becomes
// false.
template <class E>
__device__ inline Pack decoded(const PackOfCodes<E>& codes, const PackOfScales& scales, ScaleRule rule, bool& extreme) {
  Pack out;
  bool ordinary = true;
  const float zero = rule == ScaleRule::flashinfer ? 0.0F : -0.0F;  // under flashinfer -0 becomes 0, else adding this changes nothing
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) {
    ordinary = ordinary && !extreme_scale<E>(scales.at(i)) && (codes.at(i) & E::magnitude_mask) <= E::max_code;
    out.at[i] = decode_scaled<E>(codes.at(i), scales.at(i)) + zero;
  }
  if (ordinary) return out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) {
    extreme = extreme || ((codes.at(i) & E::magnitude_mask) != 0 && extreme_scale<E>(scales.at(i)));
    out.at[i] = __builtin_bit_cast(float, decode_in_block<E>(codes.at(i), scales.at(i), rule));
  }
  return out;
}

}  // namespace mantissa::gpu
