#include "nn/shards.h"

#include <gmock/gmock.h>

#include <atomic>
#include <limits>
#include <map>
#include <mutex>
#include <optional>

#include "files.h"
#include "odd_parameters.h"
#include "optim/optimizer.h"
#include "thread_ranks.h"

namespace mantissa::shards_test {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Case {
  Dtype dtype;
  int ranks;
  int64_t bucket_bytes;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.dtype << '_' << c.ranks << "_ranks_" << (c.bucket_bytes == 1 ? "small_buckets" : "one_bucket");
}

class ShardsTest : public ::testing::TestWithParam<Case> {
 protected:
  // State of all parameters: masters, moments, values and codes after three updates, the second of which is skipped; the norms.
  struct Trained {
    std::map<std::string, std::vector<double>> state;
    std::vector<double> norms;
    bool operator==(const Trained&) const = default;
  };

  static void expect_on_ranks(const std::function<void(const Communicator&, ParameterSet&)>& body) {
    const test::Threads one(1);
    const auto errors = test::run_ranks(GetParam().ranks, [&](const Communicator& data) {
      const auto device = make_backend("cpu");
      ParameterSet set;
      test::add_odd_parameters(set, *device, GetParam().dtype);
      body(data, set);
    });
    EXPECT_THAT(errors, Each(IsEmpty()));
  }

  // The gradients of each step come from one rank, so that their sum is the same for any number of ranks.
  static void set_gradients(ParameterSet& set, uint32_t step, bool here) {
    uint32_t what = 100 * step;
    for (Parameter& parameter : set.all()) {
      test::assign(parameter.leaf.grad, test::random_values(parameter.shape.elements(), what++, here ? 1.0 : 0.0));
    }
    if (here && step == 1) test::set_value(set.all()[3].leaf.grad, 64 * 40 + 3, HUGE_VAL);
  }

  static void put(Trained& out, const std::string& what, const ParameterShard& shard, const Tensor& tensor) {
    const std::vector<double> values = test::values(tensor);
    std::vector<double>& all = out.state[what + shard.of->name];
    all.resize(static_cast<size_t>(shard.of->shape.elements()));
    std::ranges::copy(values, all.begin() + shard.first_element());
  }

  // Returns the state of a rank; masters and moments go into `shared`, where those of all ranks meet.
  static Trained train(const Communicator& data, Dtype dtype, int64_t bucket_bytes, Trained& shared, std::mutex& mutex) {
    const auto device = make_backend("cpu");
    ParameterSet set;
    test::add_odd_parameters(set, *device, dtype);
    Optimizer optimizer(set, {.grad_clip = 0.5}, make_mesh(data, {}), bucket_bytes);
    optimizer.initialize(5);
    Trained out;
    for (uint32_t step = 0; step < 3; ++step) {
      set_gradients(set, step, data.rank() == static_cast<int>(step) % data.size());
      const Tensor losses = zeros(*device, Dtype::f64, {1});
      out.norms.push_back(optimizer.update(1e-2, {.losses = losses}).gradient_norm);
    }
    for (const Parameter& parameter : set.all()) {
      if (parameter.keeps_value) out.state["value." + parameter.name] = test::values(parameter.value());
      if (!parameter.quantized) continue;
      for (const auto& [what, bytes] : {std::pair{"codes.", parameter.codes().codes}, {"scales.", parameter.codes().scales}}) {
        const std::vector<uint8_t> read = to_host<uint8_t>(bytes);
        out.state[what + parameter.name].assign(read.begin(), read.end());
      }
    }
    const std::lock_guard lock(mutex);
    for (const Optimizer::State& state : optimizer.states()) {
      put(shared, "master.", state.shard, state.master);
      put(shared, "m.", state.shard, state.first_moment);
      put(shared, "v.", state.shard, state.second_moment);
    }
    return out;
  }
};

TEST_P(ShardsTest, HaveTheBitsOfOneRank) {
  const test::Threads one(1);
  std::mutex mutex;
  Trained alone, shared;
  const Trained expected = train({}, GetParam().dtype, Shards::bucket_bytes(1), alone, mutex);
  const auto errors = test::run_ranks(GetParam().ranks, [&](const Communicator& data) {
    const Trained own = train(data, GetParam().dtype, GetParam().bucket_bytes, shared, mutex);
    EXPECT_EQ(own.state, expected.state) << "rank " << data.rank();
    EXPECT_EQ(own.norms[0], expected.norms[0]);
    EXPECT_FALSE(std::isfinite(own.norms[1]));
    EXPECT_EQ(own.norms[2], expected.norms[2]);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  EXPECT_EQ(shared.state, alone.state);
}

// The weight lies in the part of one rank, and codes of e2m1 hide that it is NaN.
TEST_P(ShardsTest, AWeightThatIsNotFiniteOnOneRankIsSeenByAll) {
  std::atomic<int> owners{0};
  expect_on_ranks([&](const Communicator& data, ParameterSet& set) {
    Optimizer optimizer(set, {}, make_mesh(data, {}), GetParam().bucket_bytes);
    optimizer.initialize(5);
    const Parameter& bad = *set.find("layers.1.codes.weight");
    for (const Optimizer::State& state : optimizer.states()) {
      if (state.shard.of != &bad || state.shard.begin > 40 || state.shard.end <= 40) continue;
      test::set_value(state.master, (40 - state.shard.begin) * 64, std::nan(""));
      ++owners;
    }
    optimizer.store_masters();
    set_gradients(set, 0, data.rank() == 0);
    const UpdateResult result = optimizer.update(1e-2, {.losses = zeros(set.gradients().device(), Dtype::f64, {1})});
    EXPECT_TRUE(result.skipped && result.bad_weights) << "rank " << data.rank();
  });
  EXPECT_EQ(owners, 1);
}

// No array of masters or moments is full size on any rank.
TEST_P(ShardsTest, OwnEveryRowOnceAndAboutEqually) {
  std::mutex mutex;
  std::map<std::string, std::vector<int>> owners;
  expect_on_ranks([&](const Communicator& data, ParameterSet& set) {
    const Shards shards(set, make_mesh(data, {}), GetParam().bucket_bytes);
    EXPECT_EQ(shards.buckets(), GetParam().bucket_bytes == 1 ? 5U : 1U) << "embedding, three layers, output";
    int64_t owned = 0, row_blocks = 0;
    const std::lock_guard lock(mutex);
    for (const ParameterShard& shard : shards.own()) {
      std::vector<int>& rows = owners[shard.of->name];
      rows.resize(static_cast<size_t>(shard.of->shape[0]));
      for (int64_t row = shard.begin; row < shard.end; ++row) ++rows[static_cast<size_t>(row)];
      EXPECT_EQ(shard.begin % (shard.of->quantized.block_rows == 128 ? 128 : 32), 0) << shard.of->name;
      owned += shard.shape().elements();
      row_blocks += (shard.end - shard.begin + 31) / 32;
    }
    EXPECT_EQ(row_blocks, shards.norm_blocks(data.rank()));
    const int64_t largest_row_block = 128 * 128;
    EXPECT_LE(owned, set.elements() / data.size() + static_cast<int64_t>(shards.buckets()) * largest_row_block);
  });
  EXPECT_EQ(owners.size(), 17U);
  for (const auto& [name, rows] : owners) EXPECT_THAT(rows, Each(1)) << name;
}

// Two buckets of one vector each on two ranks.
struct TwoBuckets {
  std::unique_ptr<Backend> device = make_backend("cpu");
  ParameterSet set;
  std::optional<Shards> shards;

  explicit TwoBuckets(const Communicator& data) {
    for (const char* name : {"layers.0.bias", "layers.1.bias"}) set.add({.name = name, .shape = {64}});
    set.allocate(*device, Dtype::f32, true);
    shards.emplace(set, make_mesh(data, {}), 1);
  }
  Parameter& of(size_t i) { return set.all()[i]; }
};

TEST(ShardsBeside, ABucketsGradientsGoBeforeThoseOfOthersAreReady) {
  const test::Threads one(1);
  const auto errors = test::run_ranks(2, [](const Communicator& data) {
    TwoBuckets two(data);
    std::vector<std::pair<int64_t, int64_t>> finished;
    for (size_t i = 0; i < 2; ++i) two.device->run(Fill{.out = two.of(i).leaf.grad, .value = 1.0 + data.rank()});
    two.shards->send_when_ready(two.set.gradients(), [&](int64_t begin, int64_t end) { finished.emplace_back(begin, end); });
    two.of(1).leaf.ready();
    while (data.traffic().gradients == 0) std::this_thread::yield();  // ends: nothing waits for the other bucket
    EXPECT_THAT(finished, ElementsAre(std::pair(64, 128)));
    two.of(0).leaf.ready();
    two.shards->send_rest();
    two.shards->reduce_gradients();
    EXPECT_THAT(finished, ElementsAre(std::pair(64, 128), std::pair(0, 64)));
    for (const ParameterShard& shard : two.shards->own()) EXPECT_THAT(test::values(shard.gradient()), Each(3.0));
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(ShardsBeside, AGradientThatWasCompleteIsNotUsedAgain) {
  const auto errors = test::run_ranks(2, [](const Communicator& data) {
    TwoBuckets two(data);
    two.of(0).leaf.ready();  // nobody waits for it
    two.shards->send_when_ready(two.set.gradients(), nullptr);
    two.of(0).leaf.ready();
    EXPECT_STREQ(test::error_of([&] { two.of(0).leaf.ready(); }).what(), "layers.0.bias: its gradient was complete, and then used again");
    two.shards->send_rest();
    EXPECT_STREQ(test::error_of([&] { two.shards->send_when_ready(two.set.gradients(), nullptr); }).what(),
                 "gradients are sent again before they are reduced");
    two.shards->reduce_gradients();
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// Rank 1 offers its part of the second bucket only after rank 0 has read the first.
TEST(ShardsBeside, AParameterWaitsForItsOwnBucketAlone) {
  const test::Threads one(1);
  std::atomic<bool> first_read{false};
  const auto errors = test::run_ranks(2, [&](const Communicator& data) {
    TwoBuckets two(data);
    for (const ParameterShard& shard : two.shards->own()) {
      two.device->run(
          Fill{.out = shard.of_rows(two.set.room_for_master({.of = shard.of, .begin = 0, .end = 64})), .value = 5.0 + data.rank()});
    }
    two.shards->gather(0);
    while (data.rank() == 1 && !first_read) std::this_thread::yield();
    two.shards->gather(1);
    for (size_t i = 0; i < 2; ++i) {
      const std::vector<double> values = test::values(two.of(i).value());
      EXPECT_EQ(values.front(), 5.0);
      EXPECT_EQ(values.back(), 6.0);
      if (data.rank() == 0) first_read = true;
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

TEST(ShardsBeside, WhatOutlivesThemIsFree) {
  const auto errors = test::run_ranks(2, [](const Communicator& data) {
    TwoBuckets two(data);
    two.shards->gather();
    two.shards.reset();
    two.of(0).value();
    EXPECT_FALSE(two.of(1).leaf.ready);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    for (const int ranks : {2, 3, 13}) out.push_back({dtype, ranks, ranks % 2 == 0 ? 1 : Shards::bucket_bytes(ranks)});
  }
  for (const int ranks : {1, 3, 8}) out.push_back({Dtype::bf16, ranks, 1});
  return out;
}

INSTANTIATE_TEST_SUITE_P(, ShardsTest, ::testing::ValuesIn(cases()), ::testing::PrintToStringParamName());

// Four data ranks, of which neighbors share six experts of 32 rows: norms come in the order of one process, and the owner of every row is
// one of those that hold it.
TEST(ShardsOfExperts, AreInTheOrderOfOneProcess) {
  const auto errors = test::run_ranks(4, [](const Communicator& world) {
    const auto device = make_backend("cpu");
    ParameterSet set;
    const Sharding experts{.ranks = {.expert = 2, .expert_rank = world.rank() % 2}};
    set.add({.name = "layers.0.router.weight", .shape = {70, 8}});
    set.add({.name = "layers.0.up.weight", .shape = {96, 8}, .sharding = experts, .matrices = 3});
    set.add({.name = "layers.0.down.weight", .shape = {96, 4}, .sharding = experts, .matrices = 3});
    set.add({.name = "final.weight", .shape = {40}});
    set.allocate(*device, Dtype::f32, true);
    const Shards shards(set, make_mesh(world, {.expert = 2}));
    // The place in the whole of each block of 32 rows: parameter and row.
    std::vector<double> own;
    for (const ParameterShard& shard : shards.own()) {
      const auto first =
          static_cast<double>(int64_t{1000} * shard.of->number() +
                              (shard.of->among_experts() ? int64_t{96} * experts.ranks.expert_rank : int64_t{0}) + shard.begin);
      for (int64_t row = shard.begin; row < shard.end; row += 32) own.push_back(first + static_cast<double>(row - shard.begin));
    }
    ASSERT_EQ(std::ssize(own), shards.norm_blocks(world.rank()));
    std::vector<std::vector<double>> by_rank(4);
    const std::vector<int64_t> sizes = world.all(static_cast<int64_t>(own.size()));
    for (size_t r = 0; r < 4; ++r) {
      by_rank[r] = own;
      by_rank[r].resize(static_cast<size_t>(sizes[r]));
      world.broadcast(std::as_writable_bytes(std::span(by_rank[r])), static_cast<int>(r), Purpose::other);
    }
    EXPECT_THAT(shards.in_order(by_rank),
                ElementsAre(0, 32, 64, 1000, 1032, 1064, 1096, 1128, 1160, 2000, 2032, 2064, 2096, 2128, 2160, 3000, 3032));
    for (const bool of_experts : {false, true}) {
      std::map<std::string, int64_t> rows;  // rows before these have an owner
      for (int rank = 0; rank < shards.group(of_experts).size(); ++rank) {
        for (const ParameterShard& shard : shards.of_rank(of_experts, rank)) {
          EXPECT_EQ(shard.begin, rows[shard.of->name]);
          rows[shard.of->name] = shard.end;
        }
      }
      const std::map<std::string, int64_t> shared = {{"layers.0.up.weight", 96}, {"layers.0.down.weight", 96}},
                                           alike = {{"layers.0.router.weight", 70}, {"final.weight", 40}};
      EXPECT_EQ(rows, of_experts ? shared : alike);
    }
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
}

// The first row of the experts that each rank owns is bad: rank 2 owns later rows of the experts that rank 0 holds, too, and both come
// before those of ranks 1 and 3.
TEST(ShardsOfExperts, OrderWhatIsNotFiniteByItsRowInTheWhole) {
  std::vector<Optimizer::Nonfinite> found(4);
  const auto errors = test::run_ranks(4, [&](const Communicator& world) {
    const auto device = make_backend("cpu");
    ParameterSet set;
    const Sharding experts{.ranks = {.expert = 2, .expert_rank = world.rank() % 2}};
    set.add({.name = "router.weight", .shape = {70, 8}});
    set.add({.name = "up.weight", .shape = {96, 8}, .sharding = experts, .matrices = 3});
    set.allocate(*device, Dtype::f32, true);
    Optimizer optimizer(set, {}, make_mesh(world, {.expert = 2}), 1);
    optimizer.initialize(5);
    for (const Optimizer::State& state : optimizer.states()) {
      if (state.shard.of->among_experts())
        device->run(Fill{.out = state.shard.gradient(), .value = std::numeric_limits<double>::infinity()});
    }
    found[static_cast<size_t>(world.rank())] = optimizer.first_nonfinite(Optimizer::Checked::gradients);
  });
  EXPECT_THAT(errors, Each(IsEmpty()));
  std::vector<int> order = {0, 1, 2, 3};
  std::ranges::sort(order, {}, [&](int rank) { return found[static_cast<size_t>(rank)].row; });
  EXPECT_THAT(order, ElementsAre(0, 2, 1, 3));
  for (const Optimizer::Nonfinite& of_rank : found) {
    EXPECT_EQ(of_rank.parameter, 1U);
    EXPECT_EQ(of_rank.text, text("up.weight[", of_rank.row, ", 0] = inf"));
  }
  EXPECT_EQ(found[0].row, 0);
  EXPECT_EQ(found[1].row, 96);
}

}  // namespace mantissa::shards_test
