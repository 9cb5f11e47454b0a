// Moments that are rounded to bf16 with the random words of their elements (MomentRounding).
#pragma once

#include "backend/cuda/codes/packs.h"
#include "backend/muon_rule.h"

namespace mantissa::gpu {

struct WordsOfPack {
  uint32_t at[kPack];
};

// Draws the words of elements [first, first + kPack). Every array has indices that the compiler knows, so it lies in registers.
__device__ inline WordsOfPack words_of_pack(const MomentWords& words, int64_t first) {
  WordsOfPack out;
  const uint64_t number = words.number(first), place = number % 4;
  const bool adjacent = words.number(first + kPack - 1) == number + kPack - 1;
  if (adjacent) {
    uint32_t drawn[kPack + 4];
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack + 4; i += 4) {
      const auto four = words.of_four(number + i);
      MANTISSA_UNROLL
      for (unsigned word = 0; word < 4; ++word) drawn[i + word] = four[word];
    }
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i)
      out.at[i] = place < 2 ? (place == 0 ? drawn[i] : drawn[i + 1]) : (place == 2 ? drawn[i + 2] : drawn[i + 3]);
  } else {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const uint64_t own = words.number(first + i), of = own % 4;
      const auto four = words.of_four(own);
      out.at[i] = of < 2 ? (of == 0 ? four[0] : four[1]) : (of == 2 ? four[2] : four[3]);
    }
  }
  return out;
}

// Writes a pack of moments: `shift` says which half of a word rounds each.
__device__ inline void write_moments(const Packs<bf16>& to, int64_t first, Pack moments, const WordsOfPack& words, unsigned shift) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) moments.at[i] = to_float(to_bf16_at_random(moments.at[i], words.at[i] >> shift));
  to.write(first, moments);
}

}  // namespace mantissa::gpu
