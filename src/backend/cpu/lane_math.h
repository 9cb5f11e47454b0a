// Arithmetic of one element without branches, for plain loops over rows inside functions marked MANTISSA_CLONES: GCC vectorises them with
// the widest registers of each clone. Sums, whose order a compiler may not change, are written with the vectors of simd.h instead.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "mantissa/formats/bf16.h"

namespace mantissa::lane {

[[gnu::always_inline]] inline float load(float from) { return from; }
[[gnu::always_inline]] inline float load(bf16 from) { return std::bit_cast<float>(static_cast<uint32_t>(from.bits) << 16); }

[[gnu::always_inline]] inline void store(float& to, float value) { to = value; }
// The same bits as to_bf16.
[[gnu::always_inline]] inline void store(bf16& to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = value == value ? bits + 0x7FFFU + ((bits >> 16) & 1U) : bits | 0x00400000U;
  to.bits = static_cast<uint16_t>(rounded >> 16);
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

// e^x within 3 ulp for x in [-87.3, 88], anything outside; NaN stays.
// x = k ln 2 + r, |r| <= ln 2 / 2; a minimax polynomial for e^r with relative error 1.5e-7.
[[gnu::always_inline]] inline float exp_inside(float x) {
  // Adding 1.5 * 2^23 rounds to an integer; with 127 added, the low bits are the biased exponent of 2^k.
  constexpr float kRound = 12582912.0F + 127.0F;
  const float rounded = fma(x, 1.44269504F, kRound);
  const float r = fma(rounded - kRound, -0.693147182F, x);
  float p = fma(8.29765729e-3F, r, 4.19153819e-2F);
  p = fma(p, r, 1.66675747e-1F);
  p = fma(p, r, 4.99988949e-1F);
  p = fma(p, r, 9.99999692e-1F);
  p = fma(p, r, 1.0F);  // 1 exactly, so that e^0 is 1
  return p * std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) << 23);
}

// For x <= 88. No subnormal results: 0 below -87.3. Selected by bits, because GCC does not vectorise the choice between a constant and a
// computation that might trap.
[[gnu::always_inline]] inline float exp(float x) {
  const uint32_t keep = x < -87.3F ? 0U : ~0U;
  const float e = exp_inside(std::bit_cast<float>(std::bit_cast<uint32_t>(x) & keep));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(e) & keep);
}

// e^x with x clamped to [-87, 88]; a NaN becomes a number. The bounds are compared as integers, where a minimum is one instruction:
// positive floats are ordered as signed integers, negative ones as unsigned.
[[gnu::always_inline]] inline float exp_clamped(float x) {
  const int32_t below = std::min(std::bit_cast<int32_t>(x), std::bit_cast<int32_t>(88.0F));
  const uint32_t inside = std::min(std::bit_cast<uint32_t>(below), std::bit_cast<uint32_t>(-87.0F));
  return exp_inside(std::bit_cast<float>(inside));
}

// 1 / (1 + e^-x). Not for NaN: multiply by x where one may come.
[[gnu::always_inline]] inline float sigmoid(float x) { return 1.0F / (1.0F + exp_clamped(-x)); }

// Phi(x), the normal distribution function, and exp(-x^2 / 2), which it needs anyway. Not for NaN either.
struct Normal {
  float cdf, bell;
};
// The upper tail is 0.5 erfc(t), t = |x| / sqrt 2, and erfc(t) = exp(-t^2) w P(w), w = 1 / (1 + t / 2): a minimax fit with relative error
// 4.2e-8 for t <= 9.4. No cancellation: the lower tail keeps its relative accuracy, up to the rounding of x^2.
[[gnu::always_inline]] inline Normal normal(float x) {
  const float bell = exp_clamped(x * x * -0.5F);
  const float w = 1.0F / fma(__builtin_fabsf(x), 0.353553391F, 1.0F);
  float p = fma(-0.0588470876F, w, 0.283487534F);
  p = fma(p, w, -0.484936655F);
  p = fma(p, w, 0.275462673F);
  p = fma(p, w, -0.0248193301F);
  p = fma(p, w, 0.201916593F);
  p = fma(p, w, 0.243300223F);
  p = fma(p, w, 0.282348014F);
  p = fma(p, w, 0.282087994F);
  const float tail = bell * w * p * 0.5F;
  const float whole = x < 0.0F ? 0.0F : 1.0F;  // tail or 1 - tail, without a branch
  return {__builtin_fabsf(whole - tail), bell};
}

}  // namespace mantissa::lane
