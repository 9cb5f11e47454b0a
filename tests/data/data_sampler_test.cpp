#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "data/batch.h"

namespace mantissa::data_sampler_test {

std::vector<int64_t> order(int64_t size, uint64_t seed, uint64_t epoch, uint32_t dataset = 0) {
  const Permutation permutation(size, seed, dataset, epoch);
  std::vector<int64_t> out;
  for (int64_t i = 0; i < size; ++i) out.push_back(permutation(i));
  return out;
}

TEST(Permutation, IsABijectionForEverySize) {
  std::vector<int64_t> sizes(300);
  std::iota(sizes.begin(), sizes.end(), 1);
  for (const int64_t size : {511, 512, 513, 4095, 4096, 4097, 65537, 100003}) sizes.push_back(size);
  for (const int64_t size : sizes) {
    std::vector<int64_t> sorted = order(size, 1234, 7);
    std::sort(sorted.begin(), sorted.end());
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(sorted[static_cast<size_t>(i)], i) << "size " << size;
  }
}

TEST(Permutation, StaysInRangeForLargeSizes) {
  for (const int64_t size : {(int64_t{1} << 40) + 1, (int64_t{1} << 62) - 1, int64_t{1} << 62}) {
    const Permutation permutation(size, 99, 0, 0);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < 1000; ++i) {
      const int64_t value = permutation(size - 1 - i);
      ASSERT_GE(value, 0);
      ASSERT_LT(value, size);
      EXPECT_TRUE(seen.insert(value).second);
    }
  }
}

TEST(Permutation, DependsOnSeedEpochAndDataset) {
  const auto base = order(1000, 1, 0);
  EXPECT_EQ(order(1000, 1, 0), base);
  EXPECT_NE(order(1000, 2, 0), base);
  EXPECT_NE(order(1000, 1, 1), base);
  EXPECT_NE(order(1000, 1, uint64_t{1} << 32), base);
  EXPECT_NE(order(1000, 1, 0, 1), base);
}

TEST(Permutation, SpreadsNeighborsAndFirstPlaces) {
  // Neighbors stay neighbors about twice in a random order of any length.
  const auto values = order(100000, 5, 0);
  int64_t adjacent = 0;
  for (size_t i = 1; i < values.size(); ++i) adjacent += std::abs(values[i] - values[i - 1]) == 1;
  EXPECT_LE(adjacent, 15);
  // Each of 3 samples comes first in about a third of the epochs: 1000 +- 5 standard deviations (26).
  std::vector<int> first(3);
  for (uint64_t epoch = 0; epoch < 3000; ++epoch) ++first[static_cast<size_t>(order(3, 5, epoch)[0])];
  for (const int count : first) EXPECT_NEAR(count, 1000, 130);
}

std::vector<SampleId> draws(Sampler& sampler, int64_t begin, int64_t end) {
  std::vector<SampleId> out;
  for (int64_t counter = begin; counter < end; ++counter) out.push_back(sampler.at(counter));
  return out;
}

TEST(Sampler, MixtureFollowsTheGreedyRule) {
  // Missing from (0, 1) at each draw: (.7, .3) (-.3, .3) (.4, -.4) (.1, -.1) (-.2, .2) (.5, -.5) (.2, -.2) (-.1, .1) (.6, -.6) (.3, -.3).
  Sampler sampler({100, 100}, {7, 3}, 1);
  std::vector<int32_t> datasets;
  for (const SampleId& id : draws(sampler, 0, 10)) datasets.push_back(id.dataset);
  EXPECT_THAT(datasets, ::testing::ElementsAre(0, 1, 0, 0, 1, 0, 0, 1, 0, 0));
}

TEST(Sampler, MixtureKeepsItsProportionsAtEveryPrefix) {
  const std::vector<double> weights = {0.5, 0.3, 0.15, 0.05};
  Sampler sampler({1000, 10, 70, 3}, weights, 3);
  std::vector<double> taken(4);
  for (int64_t n = 1; n <= 20000; ++n) {
    ++taken[static_cast<size_t>(sampler.at(n - 1).dataset)];
    for (size_t i = 0; i < 4; ++i) ASSERT_NEAR(taken[i], weights[i] * static_cast<double>(n), 2.0) << n;
  }
}

TEST(Sampler, EachDatasetIsDrawnOncePerEpochOfItsOwn) {
  const std::vector<int64_t> sizes = {5, 7};
  Sampler sampler(sizes, {1, 1}, 3);
  std::set<std::pair<int64_t, int64_t>> seen[2];
  for (const SampleId& id : draws(sampler, 0, 70)) {
    EXPECT_EQ(id.epoch, std::ssize(seen[id.dataset]) / sizes[static_cast<size_t>(id.dataset)]);
    EXPECT_TRUE(seen[id.dataset].insert({id.epoch, id.sample}).second);
  }
  for (const auto& one : seen) EXPECT_EQ(one.size(), 35U);  // 7 epochs of 5, 5 of 7
}

// Ranks and batches of any size take parts of one sequence.
TEST(Sampler, AnyCountersInAnyOrderHaveTheSameSamples) {
  Sampler straight({13, 29, 4}, {0.2, 0.5, 0.3}, 77);
  const auto all = draws(straight, 0, 300);
  for (int64_t k = 0; k < 300; k += 7) {
    Sampler resumed({13, 29, 4}, {0.2, 0.5, 0.3}, 77);
    for (int64_t counter = k; counter < 300; counter += 1 + k % 5) ASSERT_EQ(resumed.at(counter), all[static_cast<size_t>(counter)]) << k;
  }
  for (int time = 0; time < 2; ++time) EXPECT_EQ(straight.at(5), all[5]) << "and backwards";
}

// The samples of one epoch of one dataset, in the order in which they are drawn.
std::vector<int64_t> drawn(Sampler sampler, int32_t dataset, int64_t epoch) {
  std::vector<int64_t> out;
  for (const SampleId& id : draws(sampler, 0, 400)) {
    if (id.dataset == dataset && id.epoch == epoch) out.push_back(id.sample);
  }
  return out;
}

TEST(Sampler, OrderDependsOnSeedEpochAndDataset) {
  const Sampler two({100, 100}, {1, 1}, 7);
  const std::vector<int64_t> base = drawn(two, 0, 0);
  EXPECT_EQ(base.size(), 100U);
  EXPECT_EQ(drawn(Sampler({100, 100}, {1, 1}, 7), 0, 0), base);
  EXPECT_NE(drawn(Sampler({100, 100}, {1, 1}, 8), 0, 0), base);
  EXPECT_NE(drawn(two, 0, 1), base);
  EXPECT_NE(drawn(two, 1, 0), base);
}

}  // namespace mantissa::data_sampler_test
