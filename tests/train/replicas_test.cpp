// Weights that differ between ranks are found and named.
#include "train/replicas.h"

#include <gmock/gmock.h>

#include "optim/optimizer.h"
#include "testing.h"
#include "thread_ranks.h"

namespace mantissa::replicas_test {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// The errors of three ranks that have the same weights, but for the changes of change(rank, set).
std::vector<std::string> compare(const std::function<void(int, ParameterSet&)>& change) {
  return test::run_ranks(3, [&](const Communicator& world) {
    const auto device = make_backend("cpu");
    ParameterSet set;
    const Quantization tiles{Format::e4m3, 32, 32};
    set.add({.name = "fp32.weight", .shape = {96, 5}, .init = {.std = 0.5}});
    set.add({.name = "bf16.weight", .shape = {96, 5}, .init = {.std = 0.5}, .dtype = Dtype::bf16});
    set.add({.name = "copy.weight", .shape = {96, 64}, .init = {.std = 0.5}, .dtype = Dtype::bf16, .quantized = tiles});
    set.add({.name = "codes.weight", .shape = {96, 64}, .init = {.std = 0.5}, .quantized = tiles, .keeps_value = false});
    set.add({.name = "bias", .shape = {5}});
    set.add_buffer({.name = "expert_bias", .shape = {7}});
    set.allocate(*device, Dtype::f32, true);
    Optimizer optimizer(set, {}, make_mesh(world, {}), 1);
    optimizer.initialize(5);
    change(world.rank(), set);
    require_same_replicas(optimizer, set);
  });
}

TEST(Replicas, EqualWeightsAreEqual) {
  EXPECT_THAT(compare([](int, ParameterSet&) {}), Each(IsEmpty()));
}

// Each parameter of 96 rows has 32 on each rank.
TEST(Replicas, OneBitNamesRankTensorAndOwnerOnAllRanks) {
  const auto expect = [](int rank, const std::string& message, const std::function<void(ParameterSet&)>& change) {
    const auto errors = compare([&](int own, ParameterSet& set) {
      if (own == rank) change(set);
    });
    EXPECT_THAT(errors, Each(AllOf(StartsWith("5: "), HasSubstr(message)))) << message;
  };
  expect(1, "rank 1 differs from rank 0 in fp32.weight, rows 0 to 31,", [](ParameterSet& set) { test::flip_bit(set.all()[0].value(), 3); });
  expect(2, "rank 2 differs from rank 1 in bf16.weight, rows 32 to 63,",
         [](ParameterSet& set) { test::flip_bit(set.all()[1].value(), 32 * 5 * 2); });
  expect(0, "rank 0 differs from rank 2 in copy.weight, rows 64 to 95,",
         [](ParameterSet& set) { test::flip_bit(set.all()[2].value(), 96 * 64 * 2 - 1); });
  expect(0, "rank 0 differs from rank 2 in copy.weight, rows 64 to 95,",
         [](ParameterSet& set) { test::flip_bit(set.all()[2].codes().codes, 96 * 64 - 1); });
  expect(0, "rank 0 differs from rank 1 in codes.weight, rows 32 to 63,",
         [](ParameterSet& set) { test::flip_bit(set.all()[3].codes().codes, 40 * 64); });
  expect(0, "rank 0 differs from rank 1 in codes.weight, rows 32 to 63,",
         [](ParameterSet& set) { test::flip_bit(set.all()[3].codes().scales, 2); });
  expect(0, "rank 1 differs from rank 0 in fp32.weight, rows 0 to 31,",
         [](ParameterSet& set) { test::flip_bit(set.all()[0].value(), 0); });  // the owner is right
  expect(2, "rank 2 differs from rank 0 in expert_bias, rows 0 to 6,",
         [](ParameterSet& set) { test::flip_bit(set.buffers()[0].value, 27); });
}

// The errors of four ranks, two tensor ranks in each of two replicas, that hold norms alike and rows of matrices apart.
std::vector<std::string> compare_four(const std::function<void(int, ParameterSet&, Optimizer&)>& change) {
  return test::run_ranks(4, [&](const Communicator& world) {
    const Mesh mesh = make_mesh(world, {.tensor = 2});
    const auto device = make_backend("cpu");
    ParameterSet set;
    set.add(sharded({.name = "norm.weight", .shape = {64}, .init = {.constant = 1.0}, .dtype = Dtype::bf16}, {.ranks = mesh.ranks()}));
    set.add(
        sharded({.name = "up.weight", .shape = {128, 8}, .init = {.std = 0.5}}, {.split = Split::column_parallel, .ranks = mesh.ranks()}));
    set.allocate(*device, Dtype::f32, true);
    Optimizer optimizer(set, {}, mesh, 1);
    optimizer.initialize(5);
    for (const Optimizer::State& state : optimizer.states()) {
      for (const Tensor& moment : {state.first_moment, state.second_moment}) device->run(Fill{.out = moment, .value = 0.25});
    }
    change(world.rank(), set, optimizer);
    require_same_replicas(optimizer, set);
  });
}

TEST(Replicas, OfTensorRanksAreComparedWhereTheyHoldTheSame) {
  EXPECT_THAT(compare_four([](int, ParameterSet&, Optimizer&) {}), Each(IsEmpty()));
  const auto norms = compare_four([](int rank, ParameterSet& set, Optimizer&) {
    if (rank == 1 || rank == 3) test::flip_bit(set.all()[0].value(), 3);  // both replicas: only the tensor ranks differ
  });
  EXPECT_THAT(norms, Each(HasSubstr("rank 1 differs from rank 0 in norm.weight, rows 0 to 31,")));
  const auto rows = compare_four([](int rank, ParameterSet& set, Optimizer&) {
    if (rank == 3) test::flip_bit(set.all()[1].value(), 3);
  });
  EXPECT_THAT(rows, Each(HasSubstr("rank 3 differs from rank 1 in up.weight, rows 0 to 31,")));
}

// Each of the two data ranks has 32 of the norm's 64 masters: rank 3 those that rank 2 has.
TEST(Replicas, OfTensorRanksHaveTheSameMastersAndMomentsToTheBit) {
  const std::pair<const char*, Tensor Optimizer::State::*> members[] = {
      {"master.", &Optimizer::State::master}, {"m.", &Optimizer::State::first_moment}, {"v.", &Optimizer::State::second_moment}};
  for (const auto& [name, member] : members) {
    const auto errors = compare_four([&](int rank, ParameterSet&, Optimizer& optimizer) {
      if (rank == 3) test::flip_bit(optimizer.states().front().*member, 32 * 4 - 1);
    });
    EXPECT_THAT(errors,
                Each(AllOf(StartsWith("5: "), HasSubstr(text("rank 3 differs from rank 2 in ", name, "norm.weight, rows 32 to 63,")))));
  }
  const auto apart = compare_four([](int rank, ParameterSet&, Optimizer& optimizer) {
    if (rank == 3) test::flip_bit(optimizer.states().back().first_moment, 0);  // a matrix that nobody else has
  });
  EXPECT_THAT(apart, Each(IsEmpty()));
}

// Ranks 0 and 2 hold the first experts, 1 and 3 the others.
TEST(Replicas, OfExpertsAreComparedByWhoHoldsTheSame) {
  const auto compare_experts = [](int changed) {
    return test::run_ranks(4, [&](const Communicator& world) {
      const auto device = make_backend("cpu");
      ParameterSet set;
      set.add({.name = "norm.weight", .shape = {64}, .init = {.constant = 1.0}});
      set.add({.name = "up.weight",
               .shape = {64, 8},
               .init = {.std = 0.5},
               .sharding = {.ranks = {.expert = 2, .expert_rank = world.rank() % 2}},
               .matrices = 2});
      set.allocate(*device, Dtype::f32, true);
      Optimizer optimizer(set, {}, make_mesh(world, {.expert = 2}), 1);
      optimizer.initialize(5);
      if (world.rank() == changed) test::flip_bit(set.all()[1].value(), 3);
      require_same_replicas(optimizer, set);
    });
  };
  EXPECT_THAT(compare_experts(-1), Each(IsEmpty()));
  EXPECT_THAT(compare_experts(3), Each(HasSubstr("rank 3 differs from rank 1 in up.weight, rows 0 to 31,")));
}

}  // namespace mantissa::replicas_test
