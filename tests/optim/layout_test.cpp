// Layout, which describes a model without memory, agrees with ParameterSet, Shards and Optimizer.
#include <gmock/gmock.h>

#include <numeric>

#include "nn/parameter.h"
#include "nn/shards.h"
#include "odd_parameters.h"
#include "optim/optimizer.h"
#include "thread_ranks.h"

namespace mantissa::layout_test {

using ::testing::Each;
using ::testing::IsEmpty;

struct Case {
  Dtype dtype;
  int64_t bucket_bytes;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.dtype << '_' << c.bucket_bytes; }

class LayoutTest : public ::testing::TestWithParam<Case> {
 protected:
  Layout layout_{test::odd_parameters(GetParam().dtype), GetParam().bucket_bytes};
};

TEST_P(LayoutTest, TotalsAreTheBytesOfTheArenas) {
  const auto device = make_backend("cpu");
  ParameterSet set;
  test::add_odd_parameters(set, *device, GetParam().dtype);
  const Layout::Totals& totals = layout_.totals();
  EXPECT_EQ(totals.gradients, set.gradients().bytes());
  int64_t sources = 0, one_by_one = 0, copies = 0;
  for (const ArenaMap& arena : set.sources()) sources += arena.memory.defined() ? arena.memory.bytes() : 0;
  EXPECT_EQ(totals.gathered(), sources);
  for (size_t i = 0; i < layout_.parameters().size(); ++i) one_by_one += layout_.gathered(i);
  EXPECT_EQ(one_by_one, sources);
  for (const Parameter& parameter : set.all()) copies += parameter.keeps_value && parameter.quantized ? parameter.codes().bytes() : 0;
  EXPECT_GE(totals.copies, copies);
  EXPECT_LT(totals.copies, copies + 3 * 2 * 64);
  EXPECT_EQ(totals.fp32_values > 0, GetParam().dtype == Dtype::f32);
}

TEST_P(LayoutTest, SharesAreWhatRanksOwnAndSend) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    std::vector<Layout::Share> expected(static_cast<size_t>(ranks));
    Layout::Share all;
    for (const Layout::Bucket& bucket : layout_.buckets()) {
      const std::vector<Layout::Share> shares = layout_.shares(bucket, ranks);
      for (size_t r = 0; r < shares.size(); ++r) {
        for (const auto member : {&Layout::Share::gradients, &Layout::Share::gathered, &Layout::Share::masters, &Layout::Share::moments,
                                  &Layout::Share::norm_blocks}) {
          expected[r].*member += shares[r].*member;
          all.*member += shares[r].*member;
        }
      }
    }
    EXPECT_EQ(all.gradients, layout_.totals().gradients);
    EXPECT_EQ(all.gathered, layout_.totals().gathered());
    const auto errors = test::run_ranks(ranks, [&](const Communicator& data) {
      const Layout::Share& own = expected[static_cast<size_t>(data.rank())];
      const auto device = make_backend("cpu");
      ParameterSet set;
      test::add_odd_parameters(set, *device, GetParam().dtype);
      Optimizer optimizer(set, {}, make_mesh(data, {}), GetParam().bucket_bytes);
      EXPECT_EQ(optimizer.shards().buckets(), layout_.buckets().size());
      EXPECT_EQ(optimizer.shards().norm_blocks(data.rank()), own.norm_blocks);
      int64_t moments = 0, masters = 0;
      for (const Optimizer::State& state : optimizer.states()) {
        moments += 8 * arena_elements(state.shard.shape().elements());
        masters += set.value_is_master(*state.shard.of) ? 0 : 4 * arena_elements(state.shard.shape().elements());
      }
      EXPECT_EQ(moments, own.moments);
      EXPECT_EQ(masters, own.masters);
      optimizer.initialize(1);
      optimizer.shards().arrive();
      EXPECT_EQ(data.traffic().parameters, (ranks - 1) * own.gathered) << data.rank() << " of " << ranks;
      optimizer.update(1e-3, {.losses = zeros(*device, Dtype::f64, {1})});
      EXPECT_EQ(data.traffic().gradients, ranks == 1 ? 0 : all.gradients - own.gradients) << data.rank() << " of " << ranks;
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << ranks;
  }
}

// Every third parameter is frozen, which leaves a bucket of vectors with nothing that is trained.
TEST_P(LayoutTest, FrozenParametersAreOwnedAndOnceGathered) {
  std::vector<ParameterSpec> specs = test::odd_parameters(GetParam().dtype);
  for (size_t i = 0; i < specs.size(); i += 3) specs[i].training.lr_factor = 0.0;
  specs.back().training.lr_factor = 0.0;
  const Layout layout(specs, GetParam().bucket_bytes);
  EXPECT_EQ(layout.totals().gathered(), layout_.totals().gathered());
  EXPECT_LT(layout.totals().gradients, layout_.totals().gradients);
  for (const int ranks : {1, 2, 3, 7}) {
    std::vector<Layout::Share> expected(static_cast<size_t>(ranks));
    int64_t gradients = 0;
    for (const Layout::Bucket& bucket : layout.buckets()) {
      const std::vector<Layout::Share> shares = layout.shares(bucket, ranks);
      for (size_t r = 0; r < shares.size(); ++r) {
        for (const auto member : {&Layout::Share::gradients, &Layout::Share::gathered, &Layout::Share::masters, &Layout::Share::moments,
                                  &Layout::Share::norm_blocks})
          expected[r].*member += shares[r].*member;
        gradients += shares[r].gradients;
      }
    }
    EXPECT_EQ(gradients, layout.totals().gradients);
    const auto errors = test::run_ranks(ranks, [&](const Communicator& data) {
      const Layout::Share& own = expected[static_cast<size_t>(data.rank())];
      const auto device = make_backend("cpu");
      ParameterSet set;
      for (const ParameterSpec& spec : specs) set.add(spec);
      set.allocate(*device, Dtype::f32, true);
      EXPECT_EQ(set.gradients().bytes(), layout.totals().gradients);
      Optimizer optimizer(set, {}, make_mesh(data, {}), GetParam().bucket_bytes);
      EXPECT_EQ(optimizer.shards().norm_blocks(data.rank()), own.norm_blocks);
      int64_t moments = 0, masters = 0;
      for (const Optimizer::State& state : optimizer.states()) {
        EXPECT_EQ(state.first_moment.defined(), state.shard.of->trained());
        if (state.shard.of->trained()) moments += 8 * arena_elements(state.shard.shape().elements());
        masters += set.value_is_master(*state.shard.of) ? 0 : 4 * arena_elements(state.shard.shape().elements());
      }
      EXPECT_EQ(moments, own.moments);
      EXPECT_EQ(masters, own.masters);
      optimizer.initialize(1);
      optimizer.shards().arrive();
      const int64_t before = data.traffic().parameters;
      optimizer.update(1e-3, {.losses = zeros(*device, Dtype::f64, {1})});
      optimizer.shards().arrive();
      EXPECT_EQ(data.traffic().parameters - before, (ranks - 1) * own.gathered) << data.rank() << " of " << ranks;
      EXPECT_EQ(data.traffic().gradients, ranks == 1 ? 0 : gradients - own.gradients) << data.rank() << " of " << ranks;
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(, LayoutTest,
                         ::testing::Values(Case{Dtype::f32, 1}, Case{Dtype::bf16, 1}, Case{Dtype::bf16, 700'000},
                                           Case{Dtype::f32, Shards::bucket_bytes(1)}),
                         ::testing::PrintToStringParamName());

// The definition, block by block: entry r is the first row block of rank r, which begins at or after r / ranks of the whole.
std::vector<int64_t> cut_row_blocks(const std::vector<int64_t>& sizes, int ranks) {
  const int64_t whole = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<int64_t> first = {0};
  size_t row_block = 0;
  int64_t before = 0;
  for (int r = 1; r < ranks; ++r) {
    while (row_block < sizes.size() && before * ranks < whole * r) before += sizes[row_block++];
    first.push_back(static_cast<int64_t>(row_block));
  }
  first.push_back(static_cast<int64_t>(sizes.size()));
  return first;
}

void expect_cuts(const Layout& layout, const std::vector<int64_t>& row_blocks, int ranks) {
  ASSERT_EQ(layout.buckets().size(), 1U);
  const std::vector<int64_t> cuts = cut_row_blocks(row_blocks, ranks);
  const std::vector<Layout::Share> shares = layout.shares(layout.buckets().front(), ranks);
  ASSERT_EQ(shares.size(), static_cast<size_t>(ranks));
  for (size_t r = 0; r < shares.size(); ++r) ASSERT_EQ(shares[r].norm_blocks, cuts[r + 1] - cuts[r]) << r << " of " << ranks;
}

TEST(LayoutOfManyRanks, CutsParametersOfAnySizesByTheDefinition) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    const auto draw = random_words({.seed = 11}, seed, 0);
    std::vector<ParameterSpec> specs;
    std::vector<int64_t> row_blocks;
    for (uint32_t i = 0; i <= draw[0] % 5; ++i) {
      const auto size = random_words({.seed = 12}, seed, i);
      const int64_t rows = 1 + size[0] % 400, columns = 1 + size[1] % (seed % 3 == 0 ? 1 : 500);
      specs.push_back({.name = text("a.", i), .shape = {rows, columns}});
      for (int64_t row = 0; row < rows; row += 32) row_blocks.push_back(std::min<int64_t>(32, rows - row) * columns);
    }
    expect_cuts(Layout(specs, 1), row_blocks, 1 + static_cast<int>(draw[1] % 9));
  }
  expect_cuts(Layout({{.name = "a.bias", .shape = {5}}}, 1), {5}, 4);  // three ranks have nothing
  // Shares that would begin with each element of a bucket, so with the last one of a parameter, too.
  const Layout vectors({{.name = "a.weight", .shape = {33}}, {.name = "a.bias", .shape = {64}}}, 1);
  for (int ranks = 2; ranks <= 97; ++ranks) expect_cuts(vectors, {32, 1, 32, 32}, ranks);
  // Far more ranks than row blocks, and sizes that no machine holds.
  for (const int64_t rows : {33, 50257, 1 << 20}) {
    const Layout layout(
        {{.name = "a.weight", .shape = {rows, 768}, .dtype = Dtype::bf16}, {.name = "a.bias", .shape = {rows}, .dtype = Dtype::bf16}}, 1);
    std::vector<int64_t> row_blocks;
    for (const int64_t row_elements : {768, 1}) {
      for (int64_t row = 0; row < rows; row += 32) row_blocks.push_back(std::min<int64_t>(32, rows - row) * row_elements);
    }
    for (const int ranks : {2, 5, 1000, 4096}) expect_cuts(layout, row_blocks, ranks);
  }
}

TEST(LayoutOfManyRanks, CountsWhatNoMachineHolds) {
  const int64_t rows = int64_t{1} << 31, columns = 1 << 20;
  const Layout layout({{.name = "embed.weight", .shape = {rows, columns}, .dtype = Dtype::bf16}}, 1);
  int64_t gradients = 0, row_blocks = 0;
  for (const Layout::Share& share : layout.shares(layout.buckets().front(), 65536)) {
    EXPECT_EQ(share.gradients, 4 * rows * columns / 65536);
    gradients += share.gradients;
    row_blocks += share.norm_blocks;
  }
  EXPECT_EQ(gradients, 4 * rows * columns);
  EXPECT_EQ(row_blocks, rows / 32);
}

}  // namespace mantissa::layout_test
