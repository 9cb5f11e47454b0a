// Eight fp32 lanes for the fast CPU kernels, as GCC vector types: one source for every clone.
// Everything here is always_inline, so it is compiled inside each clone with that clone's instructions. Eight lanes are one AVX2 register;
// wider types gain nothing in kernels that wait for memory and are split badly where the CPU has no AVX-512.
//
// A kernel body is written once for whole vectors and for the remainder of a row:
//   for_lanes(n, [&](int64_t j, auto part) __attribute__((always_inline)) { store(y + j, load(x + j, part) * 2.0F, part); });
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/cpu_level.h"
#include "mantissa/base/host_device.h"
#include "mantissa/formats/bf16.h"

namespace mantissa {

// Fast CPU kernels are compiled once for each level of the instruction set (base/cpu_level.h), and cloned<body>(arguments...) calls the
// clone of the level in use:
//   cloned<add_range<float>>(a, b, out, n);
// All clones give the same bits, but for which NaN a NaN is: no sum is reassociated, and fused multiply-adds are written out.
//
// A second body runs at the level of the build, where the first has instructions of AVX2, and a third one where there is AVX-512:
//   cloned<look_up<true>, look_up<false>>(arguments...);
//   cloned<decode<false>, decode<false>, decode<true>>(arguments...);
//
// The body is an always_inline function over a range, because a clone consists of what is inlined into it: a function that it calls without
// being always_inline, lambdas included, stays at the level of the build, SSE2. The dispatch is one comparison, so a body may take as
// little as a row.

// True if this build compiles clones for levels. Bodies with instructions of a level take it as a template argument, in place of true, so
// that other builds do not instantiate them.
inline constexpr bool kCpuLevels = MANTISSA_CPU_LEVELS;

template <auto kBody, auto kBaseline, auto kWidest>
struct Clones;

template <class Result, class... Args, Result (*kBody)(Args...), Result (*kBaseline)(Args...), Result (*kWidest)(Args...)>
struct Clones<kBody, kBaseline, kWidest> {
  MANTISSA_TARGET("x86-64-v4") static Result v4(Args... args) { return kWidest(args...); }
  MANTISSA_TARGET("x86-64-v3") static Result v3(Args... args) { return kBody(args...); }
  [[gnu::noinline]] static Result baseline(Args... args) { return kBaseline(args...); }

  static Result run(Args... args) {
    switch (cpu_level()) {
      case CpuLevel::x86_64_v4: return v4(args...);
      case CpuLevel::x86_64_v3: return v3(args...);
      case CpuLevel::x86_64: break;
    }
    return baseline(args...);
  }
};

template <auto kBody, auto kBaseline = kBody, auto kWidest = kBody>
inline constexpr auto cloned = &Clones<kBody, kBaseline, kWidest>::run;

}  // namespace mantissa

namespace mantissa::simd {

inline constexpr int64_t kLanes = 8;
using Floats = float __attribute__((vector_size(32)));
using TwoFloats = float __attribute__((vector_size(64)));  // for what runs with AVX-512 alone
using Words = uint32_t __attribute__((vector_size(32)));
using Doubles = double __attribute__((vector_size(32)));  // four lanes

// Lanes of a vector that lie in memory: all, or the first ones.
struct Whole {};
struct Part {
  int64_t count;  // the first 1 to kLanes - 1
};

namespace detail {
using AnyFloats = float __attribute__((vector_size(32), aligned(4), may_alias));
using HalfWords = uint16_t __attribute__((vector_size(32)));
using AnyHalfWords = uint16_t __attribute__((vector_size(16), aligned(2), may_alias));
using AnyWords = uint32_t __attribute__((vector_size(32), aligned(2), may_alias));
}  // namespace detail

[[gnu::always_inline]] inline Floats broadcast(float value) { return Floats{} + value; }

// Loads from memory of any alignment. Lanes past a Part are `fill`.
[[gnu::always_inline]] inline Floats load(const float* from, Whole = {}, float = 0.0F) {
  return *reinterpret_cast<const detail::AnyFloats*>(from);
}
[[gnu::always_inline]] inline Floats load(const bf16* from, Whole = {}, float = 0.0F) {
  Words bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = from[i].bits;
  return reinterpret_cast<Floats>(bits << 16);
}
template <class T>
[[gnu::always_inline]] inline Floats load(const T* from, Part part, float fill = 0.0F) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(part.count) * sizeof(T));
  constexpr Words kIndex = {0, 1, 2, 3, 4, 5, 6, 7};
  return kIndex < static_cast<uint32_t>(part.count) ? load(lanes) : broadcast(fill);
}

[[gnu::always_inline]] inline void store(float* to, Floats value, Whole = {}) { *reinterpret_cast<detail::AnyFloats*>(to) = value; }
// Rounds to the same bits as to_bf16.
[[gnu::always_inline]] inline void store(bf16* to, Floats value, Whole = {}) {
  const Words bits = reinterpret_cast<Words>(value);
  const Words rounded = value == value ? bits + 0x7FFFU + ((bits >> 16) & 1U) : bits | 0x00400000U;
  const auto halves = reinterpret_cast<detail::HalfWords>(rounded);
  *reinterpret_cast<detail::AnyHalfWords*>(to) = __builtin_shufflevector(halves, halves, 1, 3, 5, 7, 9, 11, 13, 15);
}
template <class T>
[[gnu::always_inline]] inline void store(T* to, Floats value, Part part) {
  T lanes[kLanes];
  store(lanes, value);
  std::memcpy(to, lanes, static_cast<size_t>(part.count) * sizeof(T));
}

// body(j, Whole or Part) for every vector of [0, n).
template <class Body>
[[gnu::always_inline]] inline void for_lanes(int64_t n, const Body& body) {
  int64_t j = 0;
  for (; j + kLanes <= n; j += kLanes) body(j, Whole{});
  if (j < n) body(j, Part{n - j});
}

// Widens or rounds n elements.
template <class From, class To>
[[gnu::always_inline]] inline void convert(const From* from, To* to, int64_t n) {
  for_lanes(
      n, [&](int64_t j, auto part) __attribute__((always_inline)) { store(to + j, load(from + j, part), part); });
}

// Like for_lanes(), but for sums: body(j, slot, Whole or Part). Four independent slots hide the latency of an addition. Which element goes
// to which slot and lane depends on n only.
struct Slots {
  Floats slot[4] = {};
};
template <class Body>
[[gnu::always_inline]] inline void for_slots(int64_t n, const Body& body) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    body(j, 0, Whole{});
    body(j + kLanes, 1, Whole{});
    body(j + 2 * kLanes, 2, Whole{});
    body(j + 3 * kLanes, 3, Whole{});
  }
  for (; j + kLanes <= n; j += kLanes) body(j, 0, Whole{});
  if (j < n) body(j, 1, Part{n - j});
}

// Like for_slots(), but for one operand whose order does not matter: body(eight elements, slot). Lanes past the end are `fill`. Words of
// two bf16 elements are taken apart into lower and upper halves, which needs no widening.
template <class T, class Body>
[[gnu::always_inline]] inline void for_values(const T* from, int64_t n, float fill, const Body& body) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    if constexpr (std::is_same_v<T, bf16>) {
      const auto* pairs = reinterpret_cast<const detail::AnyWords*>(from + j);
      const Words first = pairs[0], second = pairs[1];
      body(reinterpret_cast<Floats>(first << 16), 0);
      body(reinterpret_cast<Floats>(first & 0xFFFF0000U), 1);
      body(reinterpret_cast<Floats>(second << 16), 2);
      body(reinterpret_cast<Floats>(second & 0xFFFF0000U), 3);
    } else {
      for (int slot = 0; slot < 4; ++slot) body(load(from + j + slot * kLanes), slot);
    }
  }
  for_lanes(
      n - j, [&](int64_t i, auto part) __attribute__((always_inline)) { body(load(from + j + i, part, fill), 0); });
}

[[gnu::always_inline]] inline float sum(Floats a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
[[gnu::always_inline]] inline float sum(const Slots& a) { return sum((a.slot[0] + a.slot[1]) + (a.slot[2] + a.slot[3])); }

// Returns NaN where `b` is NaN; a NaN in `a` is passed over.
[[gnu::always_inline]] inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

[[gnu::always_inline]] inline Floats fma(Floats a, Floats b, Floats c) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return out;
}

[[gnu::always_inline]] inline Floats sqrt(Floats a) {
  Floats out;
  for (int i = 0; i < kLanes; ++i) out[i] = __builtin_sqrtf(a[i]);
  return out;
}

// Four elements, widened on the way from memory.
[[gnu::always_inline]] inline Doubles load_doubles(const float* from) {
  Doubles out;
  for (int i = 0; i < 4; ++i) out[i] = static_cast<double>(from[i]);
  return out;
}

// e^x within 3 ulp, for x <= 88. No subnormal results: 0 below -87.3, so for -Inf too. NaN stays.
// x = k ln 2 + r, |r| <= ln 2 / 2; a minimax polynomial for e^r with relative error 1.5e-7. Adding 1.5 * 2^23 rounds to an integer; with
// 127 added, the low bits are the biased exponent of 2^k.
[[gnu::always_inline]] inline Floats exp(Floats x) {
  constexpr float kRound = 12582912.0F + 127.0F;
  const Floats rounded = fma(x, broadcast(1.44269504F), broadcast(kRound));
  const Floats r = fma(rounded - kRound, broadcast(-0.693147182F), x);
  Floats p = fma(broadcast(8.29765729e-3F), r, broadcast(4.19153819e-2F));
  p = fma(p, r, broadcast(1.66675747e-1F));
  p = fma(p, r, broadcast(4.99988949e-1F));
  p = fma(p, r, broadcast(9.99999692e-1F));
  p = fma(p, r, broadcast(1.0F));
  p *= reinterpret_cast<Floats>(reinterpret_cast<Words>(rounded) << 23);
  return x < -87.3F ? Floats{} : p;
}

}  // namespace mantissa::simd

namespace mantissa::lane {

// Arithmetic of one element without branches, for plain loops over rows in the bodies of cloned<>: GCC vectorizes them with the
// widest registers of each clone. Sums, whose order a compiler may not change, are written with the vectors above instead.

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
