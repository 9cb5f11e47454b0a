// Elementwise functions over rows, for the bodies of cloned<> (clones.h). f(float...) is given elements and returns the result, or Two of
// them; it must be always_inline. Memory that is __restrict must be a parameter: GCC does not believe it of local variables.
#pragma once

#include <type_traits>

#include "backend/cpu/fast/lane_math.h"

namespace mantissa::lane {

// out = f(in...)
template <class T, class F, class... In>
[[gnu::always_inline]] inline void map(const F& f, int64_t n, T* __restrict out, const In* __restrict... in) {
  if constexpr (std::is_same_v<T, float>) {
    for (int64_t j = 0; j < n; ++j) out[j] = f(in[j]...);
  } else {
    for (int64_t j = 0; j < n / 2; ++j) {
      words(out)[j] = word(f(low(words(in)[j])...), f(high(words(in)[j])...));
    }
    if (n % 2 != 0) store(out[n - 1], f(load(in[n - 1])...));
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
      const Two a = f(low(words(in)[j])...), b = f(high(words(in)[j])...);
      words(first)[j] = word(a.first, b.first);
      words(second)[j] = word(a.second, b.second);
    }
    if (n % 2 == 0) return;
    const Two out = f(load(in[n - 1])...);
    store(first[n - 1], out.first);
    store(second[n - 1], out.second);
  }
}

// out = f(in..., f.first(in...)), for functions that are so long that the CPU has no more than four vectors of one in flight and waits for
// results although none depends on another. On bf16 each step goes through a block before the other does.
inline constexpr int64_t kStepWords = 128;

template <class F>
struct BothSteps {
  F f;
  template <class... In>
  [[gnu::always_inline]] auto operator()(In... in) const {
    return f(in..., f.first(in...));
  }
};

template <class T, class F, class... In>
[[gnu::always_inline]] inline void map_steps(const F& f, int64_t n, T* __restrict out, const In* __restrict... in) {
  int64_t i = 0;
  if constexpr (std::is_same_v<T, bf16>) {
    alignas(64) float lows[kStepWords];
    alignas(64) float highs[kStepWords];
    for (; i + 2 * kStepWords <= n; i += 2 * kStepWords) {
      for (int64_t j = 0; j < kStepWords; ++j) {
        lows[j] = f.first(low(words(in + i)[j])...);
        highs[j] = f.first(high(words(in + i)[j])...);
      }
      for (int64_t j = 0; j < kStepWords; ++j) {
        words(out + i)[j] = word(f(low(words(in + i)[j])..., lows[j]), f(high(words(in + i)[j])..., highs[j]));
      }
    }
  }
  map(BothSteps<F>{f}, n - i, out + i, (in + i)...);
}

}  // namespace mantissa::lane
