// random_words() (base/rng.h) for many indices, in loops that g++ vectorizes. Random123's own function is not.
#pragma once

#include <cstdint>

#include "mantissa/base/rng.h"

namespace mantissa {

inline constexpr int64_t kDrawsAtOnce = 64;

// The first two or all four words of each of kDrawsAtOnce draws.
template <unsigned kWords>
struct DrawnWords {
  static_assert(kWords == 2 || kWords == 4);
  alignas(64) uint32_t of[kWords][kDrawsAtOnce];
};

// Draws for indices [index, index + kDrawsAtOnce).
template <unsigned kWords>
[[gnu::always_inline]] inline void draw_words(RngKey key, uint32_t what, uint64_t index, DrawnWords<kWords>& out) {
  for (int64_t j = 0; j < kDrawsAtOnce; ++j) {
    const uint64_t counter = index + static_cast<uint64_t>(j);
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = what,
             c3 = static_cast<uint32_t>(key.stream);
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{c0} * 0xD2511F53U, b = uint64_t{c2} * 0xCD9E8D57U;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
      c1 = static_cast<uint32_t>(b);
      c3 = static_cast<uint32_t>(a);
      k0 += 0x9E3779B9U;
      k1 += 0xBB67AE85U;
    }
    out.of[0][j] = c0;
    out.of[1][j] = c1;
    if constexpr (kWords > 2) {
      out.of[2][j] = c2;
      out.of[3][j] = c3;
    }
  }
}

}  // namespace mantissa
