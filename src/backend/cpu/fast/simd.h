// Eight fp32 lanes for the fast CPU kernels, as GCC vector types: one source for every clone (clones.h).
// Everything here is always_inline, so it is compiled inside each clone with that clone's instructions. Eight lanes are one AVX2 register;
// wider types gain nothing in kernels that wait for memory and are split badly where the CPU has no AVX-512.
//
// A kernel body is written once for whole vectors and for the remainder of a row:
//   for_lanes(n, [&](int64_t j, auto part) __attribute__((always_inline)) { store(y + j, load(x + j, part) * 2.0F, part); });
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "mantissa/formats/bf16.h"

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
