// Reports of ThreadSanitizer about device code on the executor: it ends the process with 66 where threads hand over without a barrier, or
// blocks without an atomic, and says nothing about code that is right. A process ends for each, so that the next one begins anew.
#include <gtest/gtest.h>

#include <cstdlib>

#include "gpu/device.h"

namespace mantissa::races_test {

using namespace mantissa::gpu;
using ::testing::ExitedWithCode;

constexpr unsigned kThreadsOfBlock = 64;
constexpr uint32_t kSeeds = 5;

struct Values {
  int values[kThreadsOfBlock];
};

template <class Body>
[[noreturn]] void run_and_exit(int64_t blocks, uint32_t seed, Body body) {
  simt::run_blocks(blocks, kThreadsOfBlock, seed, body);
  std::exit(0);
}
template <class Body>
void expect_race(int64_t blocks, Body body) {
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) EXPECT_EXIT(run_and_exit(blocks, seed, body), ExitedWithCode(66), "data race");
}
template <class Body>
void expect_none(int64_t blocks, Body body) {
  for (uint32_t seed = 1; seed <= kSeeds; ++seed) EXPECT_EXIT(run_and_exit(blocks, seed, body), ExitedWithCode(0), "^$");
}

enum class Missing : uint8_t { none, before, after };

// Sums a value of each warp twice, as in reduce.h.
int sum_twice(Missing missing) {
  auto& shared = block_shared<Values>();
  int sum = 0;
  for (int round = 0; round < 2; ++round) {
    if (lane() == 0) shared.values[warp()] = round;
    if (missing != Missing::before) barrier();
    for (unsigned w = 0; w < kThreadsOfBlock / kWarp; ++w) sum += shared.values[w];
    if (missing != Missing::after) barrier();
  }
  return sum;
}

TEST(RacesDeathTest, SumsBetweenBarriersHaveNone) {
  expect_none(2, [] { sum_twice(Missing::none); });
}
TEST(RacesDeathTest, AMissingBarrierBeforeASumIsReported) {
  expect_race(1, [] { sum_twice(Missing::before); });
}
TEST(RacesDeathTest, AMissingBarrierAfterASumIsReported) {
  expect_race(1, [] { sum_twice(Missing::after); });
}

// Lanes turn their values around, round after round.
template <class Order>
void turn_around(Order order) {
  auto& shared = block_shared<Values>();
  for (int round = 0; round < 3; ++round) {
    shared.values[thread()] = round;
    order();
    const int found = shared.values[thread() ^ (kWarp - 1)];
    order();
    shared.values[thread()] = found;
  }
}

TEST(RacesDeathTest, ABarrierOfAWarpHandsOver) {
  expect_none(1, [] { turn_around([] { warp_barrier(); }); });
}
TEST(RacesDeathTest, ShufflesAndVotesHandNothingOver) {
  expect_race(1, [] { turn_around([] { shuffle_xor(1, 1); }); });
  expect_race(1, [] { turn_around([] { ballot(true); }); });
}
TEST(RacesDeathTest, ABarrierOfAnotherWarpHandsNothingOver) {
  expect_race(1, [] {
    auto& shared = block_shared<Values>();
    if (thread() == 0) shared.values[0] = 1;
    warp_barrier();
    if (thread() == kWarp) shared.values[0] = 2;
  });
}

TEST(RacesDeathTest, BlocksThatWriteOneWordAreReported) {
  static uint32_t sum = 0;
  expect_race(2, [] {
    barrier();
    if (thread() == static_cast<unsigned>(block())) ++sum;
    barrier();
  });
  expect_race(2, [] {
    if (thread() == 5) sum = 1;
  });
  expect_none(2, [] { fetch_add(&sum, 1); });
}

TEST(RacesDeathTest, LaunchesFollowEachOther) {
  static uint32_t sum = 0;
  EXPECT_EXIT(
      {
        const auto add = [] {
          if (thread() == 0) ++sum;
        };
        for (uint32_t seed = 1; seed <= kSeeds; ++seed) simt::run_blocks(1, kThreadsOfBlock, seed, add);
        run_and_exit(1, kSeeds, add);
      },
      ExitedWithCode(0), "^$");
}

}  // namespace mantissa::races_test
