// Arithmetic of one element without branches, for plain loops over rows in the bodies of cloned<> (clones.h): GCC vectorizes them with the
// widest registers of each clone. Sums, whose order a compiler may not change, are written with the vectors of simd.h instead.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "mantissa/formats/bf16.h"

namespace mantissa::lane {

[[gnu::always_inline]] inline float load(float from) { return from; }
[[gnu::always_inline]] inline float load(bf16 from) { return std::bit_cast<float>(static_cast<uint32_t>(from.bits) << 16); }

[[gnu::always_inline]] inline void store(float& to, float value) { to = value; }
// Rounds to nearest, but ties away from zero: the result of an approximation is a tie once in 2^16 times, and rounding like to_bf16() would
// cost kernels a fifth of their time. A NaN stays one if it is one that arithmetic gives.
[[gnu::always_inline]] inline void store(bf16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  to.bits = static_cast<uint16_t>((value == value ? bits + 0x8000U : bits) >> 16);
}

// bf16 elements taken as the halves of words: this needs neither wider nor narrower vectors.
using Word = uint32_t __attribute__((aligned(2), may_alias));
[[gnu::always_inline]] inline const Word* words(const bf16* x) { return reinterpret_cast<const Word*>(x); }
[[gnu::always_inline]] inline Word* words(bf16* x) { return reinterpret_cast<Word*>(x); }
[[gnu::always_inline]] inline float low(uint32_t word) { return std::bit_cast<float>(word << 16); }
[[gnu::always_inline]] inline float high(uint32_t word) { return std::bit_cast<float>(word & 0xFFFF0000U); }
// Packs two results like store(), but without its check: their NaNs come from bf16 elements and from arithmetic, so the lower halves of
// these are zeros.
[[gnu::always_inline]] inline uint32_t word(float low, float high) {
  return (std::bit_cast<uint32_t>(low) + 0x8000U) >> 16 | ((std::bit_cast<uint32_t>(high) + 0x8000U) & 0xFFFF0000U);
}

// Starts to load the next row, for kernels that read the halves of a row side by side, where the hardware's own prefetching gives up:
// SwiGLU at 384 to 1024 channels doubles. Longer rows would push the current one out of the cache. Past the end of memory it does no harm.
template <class T>
[[gnu::always_inline]] inline void prefetch_row(const T* row, int64_t n) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  if (n > 128 * kLine) return;
  for (int64_t j = 0; j < n; j += kLine) __builtin_prefetch(row + j);
}

[[gnu::always_inline]] inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// 2^t for t in [-126, 127], 0 for -127. For a result that is stored as T: relative error 1.7e-7 for fp32, 1.1e-4, a twentieth of the
// rounding, for bf16. Base 2, because callers have a factor that takes in log2 e.
template <class T>
[[gnu::always_inline]] inline float exp2_inside(float t) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const float rounded = t + kRound, r = t - (rounded - kRound);
  float p;
  if constexpr (std::is_same_v<T, float>) {
    p = fma(1.32647272e-3F, r, 9.67151264e-3F);
    p = fma(p, r, 5.55073373e-2F);
    p = fma(p, r, 2.40222421e-1F);
    p = fma(p, r, 6.93146978e-1F);
  } else {
    p = fma(5.50089309e-2F, r, 2.42210959e-1F);
    p = fma(p, r, 6.93282927e-1F);
  }
  p = fma(p, r, 1.0F);  // 1 exactly, so that 2^0 is 1
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(rounded) << 23));
}

// Bounds are compared as integers, where a minimum is one instruction: positive floats are ordered as signed integers, negative ones as
// unsigned. A NaN becomes a number. Between two minima the bits stay integers, and no minimum takes references (std::min): otherwise g++ 12
// makes a branch, which AVX-512 takes by masks and AVX2 one element after the other, ten times as slow.
template <class T>
[[gnu::always_inline]] inline T least(T a, T b) {
  return a < b ? a : b;
}
[[gnu::always_inline]] inline float at_most(float t, float positive) {
  return std::bit_cast<float>(least(std::bit_cast<int32_t>(t), std::bit_cast<int32_t>(positive)));
}
[[gnu::always_inline]] inline float between(float t, float negative, float positive) {
  const int32_t below = least(std::bit_cast<int32_t>(t), std::bit_cast<int32_t>(positive));
  return std::bit_cast<float>(least(static_cast<uint32_t>(below), std::bit_cast<uint32_t>(negative)));
}

// x, or the bound beyond it. NaN stays.
[[gnu::always_inline]] inline float chosen(float a, float b, uint32_t of_a) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(a) & of_a) | (std::bit_cast<uint32_t>(b) & ~of_a));
}
[[gnu::always_inline]] inline float cut_above(float x, float bound) { return chosen(bound, x, x > bound ? ~0U : 0U); }
[[gnu::always_inline]] inline float cut_below(float x, float bound) { return chosen(bound, x, x < bound ? ~0U : 0U); }

inline constexpr float kLog2E = 1.44269504F;

// e^x = 2^t for x <= 0, t as exp2_inside can take it, with relative error 2e-7 + 1e-7 |x|. No subnormal results: below -87.3 t is -127, of
// which exp2_inside makes 0. NaN stays. Selected by bits, because GCC does not vectorize the choice between a constant and a computation
// that might trap.
[[gnu::always_inline]] inline float exponent_negative(float x) {
  const uint32_t keep = x < -87.3F ? 0U : ~0U;
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x * kLog2E) & keep) | (std::bit_cast<uint32_t>(-127.0F) & ~keep));
}

// Clamps t, for the sigmoid 1 / (1 + 2^t), to what exp2_inside can take. A NaN becomes a number: multiply by x where one may come.
[[gnu::always_inline]] inline float exponent(float t) { return between(t, -126.0F, 127.0F); }

inline constexpr float kNormalEnd = 13.2F;
// The normal distribution: |x|, the bell exp(-x^2 / 2) and the upper tail 1 - Phi(|x|); beyond kNormalEnd, where the tail is less than
// 1e-38, the values there. A NaN becomes a number here, too.
struct NormalTail {
  float inside, bell, tail;
};
// tail = 0.5 erfc(t), t = |x| / sqrt 2, and 0.5 exp(t^2) erfc(t) = w P(w), w = 1 / (1 + a |x|): minimax fits with relative error 4.2e-8 for
// fp32, 2.3e-4 for bf16. No cancellation: the tail keeps its relative accuracy, up to the rounding of x^2.
template <class T>
[[gnu::always_inline]] inline NormalTail normal_tail(float x) {
  const float inside = at_most(__builtin_fabsf(x), kNormalEnd), bell = exp2_inside<T>(inside * (inside * (-0.5F * kLog2E)));
  float w, p;
  if constexpr (std::is_same_v<T, float>) {
    w = 1.0F / fma(inside, 0.353553391F, 1.0F);
    p = fma(-0.0294235438F, w, 0.141743767F);
    p = fma(p, w, -0.242468328F);
    p = fma(p, w, 0.137731337F);
    p = fma(p, w, -0.0124096651F);
    p = fma(p, w, 0.100958297F);
    p = fma(p, w, 0.121650112F);
    p = fma(p, w, 0.141174007F);
    p = fma(p, w, 0.141043997F);
  } else {
    w = 1.0F / fma(inside, 0.3F, 1.0F);
    p = fma(0.208845035F, w, 0.0355872629F);
    p = fma(p, w, 0.137478426F);
    p = fma(p, w, 0.118204346F);
  }
  return {inside, bell, bell * (w * p)};
}

// The binary logarithm of the same tail for a result that is stored as bf16, of |x| up to kTailEnd, where the tail is 2.3e-38. It is so
// smooth that a polynomial gives it, minimax with an error that makes 1.2e-4 of the tail. This form has no division, but no bell either.
inline constexpr float kTailEnd = 12.9F;
[[gnu::always_inline]] inline float log2_tail(float inside) {
  float p = fma(2.93534512e-8F, inside, -1.83705299e-6F);
  p = fma(p, inside, 4.96132125e-5F);
  p = fma(p, inside, -7.64294236e-4F);
  p = fma(p, inside, 7.53157912e-3F);
  p = fma(p, inside, -5.11385351e-2F);
  p = fma(p, inside, -4.62292463e-1F);
  p = fma(p, inside, -1.14930749F);
  return fma(p, inside, -1.00015962F);
}

}  // namespace mantissa::lane
