#include "mantissa/base/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <thread>
#include <vector>

namespace mantissa::rng_test {

using Words = std::array<uint32_t, 4>;

// kat_vectors of Random123, lines "philox4x32 10".
TEST(Rng, PhiloxGivesTheKnownAnswers) {
  struct Known {
    Words counter;
    std::array<uint32_t, 2> key;
    Words result;
  };
  const Known known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{~0U, ~0U, ~0U, ~0U}, {~0U, ~0U}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Known& k : known) {
    const RngKey key{.seed = uint64_t{k.key[1]} << 32 | k.key[0], .stream = static_cast<RngStream>(k.counter[3])};
    EXPECT_EQ(random_words(key, k.counter[2], uint64_t{k.counter[1]} << 32 | k.counter[0]), k.result);
  }
}

TEST(Rng, SeedStreamPurposeAndIndexEachChangeTheDraw) {
  const RngKey key{.seed = 1, .stream = RngStream::init};
  const std::set<Words> draws{random_words(key, 2, 3),
                              random_words({.seed = 2, .stream = RngStream::init}, 2, 3),
                              random_words({.seed = 1 + (uint64_t{1} << 32), .stream = RngStream::init}, 2, 3),
                              random_words({.seed = 1, .stream = RngStream::data}, 2, 3),
                              random_words(key, 3, 3),
                              random_words(key, 2, 4),
                              random_words(key, 2, 3 + (uint64_t{1} << 32))};
  EXPECT_EQ(draws.size(), 7U);
}

// Standard errors at 200,000 draws: mean 0.0022, variance 0.0032, fourth moment 0.022.
TEST(Rng, NormalHasTheMomentsOfANormal) {
  constexpr int kDraws = 200000;
  double sum = 0.0, squares = 0.0, fourths = 0.0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double x = static_cast<double>(random_normal({.seed = 42}, 1, i));
    ASSERT_TRUE(std::isfinite(x));
    sum += x, squares += x * x, fourths += x * x * x * x;
  }
  EXPECT_NEAR(sum / kDraws, 0.0, 0.01);
  EXPECT_NEAR(squares / kDraws, 1.0, 0.015);
  EXPECT_NEAR(fourths / kDraws, 3.0, 0.1);
}

}  // namespace mantissa::rng_test
