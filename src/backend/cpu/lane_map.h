// Elementwise functions over rows, for functions marked MANTISSA_CLONES. f(float...) is given elements and returns the result, or Two of
// them; it must be always_inline. What is __restrict must be a parameter: GCC does not believe it of local variables.
#pragma once

#include <type_traits>

#include "backend/cpu/lane_math.h"

namespace mantissa::lane {

namespace detail {

// bf16 elements are taken as the halves of a word, and so is the result: this needs neither wider nor narrower vectors, nor does the order
// of lanes change.
using Pair = uint32_t __attribute__((aligned(2), may_alias));

[[gnu::always_inline]] inline const Pair* pairs(const bf16* x) { return reinterpret_cast<const Pair*>(x); }
[[gnu::always_inline]] inline Pair* pairs(bf16* x) { return reinterpret_cast<Pair*>(x); }
[[gnu::always_inline]] inline float low(Pair x) { return std::bit_cast<float>(x << 16); }
[[gnu::always_inline]] inline float high(Pair x) { return std::bit_cast<float>(x & 0xFFFF0000U); }

// Rounds to nearest in the upper half, a tie away from zero: what comes of an approximation is a tie once in 2^16 times, and to_bf16's
// rounding would take a seventh of the time. A NaN stays one, because those of bf16 elements and of arithmetic have a lower half of zeros.
[[gnu::always_inline]] inline uint32_t nearest(float x) { return std::bit_cast<uint32_t>(x) + 0x8000U; }
[[gnu::always_inline]] inline uint32_t pair(float low, float high) { return nearest(low) >> 16 | (nearest(high) & 0xFFFF0000U); }

[[gnu::always_inline]] inline bf16 single(float x) { return {static_cast<uint16_t>(nearest(x) >> 16)}; }

}  // namespace detail

// out = f(in...)
template <class T, class F, class... In>
[[gnu::always_inline]] inline void map(const F& f, int64_t n, T* __restrict out, const In* __restrict... in) {
  if constexpr (std::is_same_v<T, float>) {
    for (int64_t j = 0; j < n; ++j) out[j] = f(in[j]...);
  } else {
    for (int64_t j = 0; j < n / 2; ++j) {
      detail::pairs(out)[j] = detail::pair(f(detail::low(detail::pairs(in)[j])...), f(detail::high(detail::pairs(in)[j])...));
    }
    if (n % 2 != 0) out[n - 1] = detail::single(f(load(in[n - 1])...));
  }
}

struct Two {
  float first, second;
};

// {first, second} = f(in...)
template <class T, class F, class... In>
[[gnu::always_inline]] inline void map(const F& f, int64_t n, T* __restrict first, T* __restrict second, const In* __restrict... in) {
  if constexpr (std::is_same_v<T, float>) {
    for (int64_t j = 0; j < n; ++j) {
      const Two out = f(in[j]...);
      first[j] = out.first;
      second[j] = out.second;
    }
  } else {
    for (int64_t j = 0; j < n / 2; ++j) {
      const Two low = f(detail::low(detail::pairs(in)[j])...), high = f(detail::high(detail::pairs(in)[j])...);
      detail::pairs(first)[j] = detail::pair(low.first, high.first);
      detail::pairs(second)[j] = detail::pair(low.second, high.second);
    }
    if (n % 2 == 0) return;
    const Two out = f(load(in[n - 1])...);
    first[n - 1] = detail::single(out.first);
    second[n - 1] = detail::single(out.second);
  }
}

}  // namespace mantissa::lane
