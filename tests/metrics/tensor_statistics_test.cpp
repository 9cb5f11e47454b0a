// Statistics of weights and operands that tensor ranks share are those of the whole.
#include <gmock/gmock.h>

#include "metrics/run_metrics.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::tensor_statistics_test {

using ::testing::Each;
using ::testing::IsEmpty;

int64_t blocks(const PrecisionEvent& event) {
  int64_t sum = 0;
  for (const auto& [code, count] : event.scales) sum += count;
  return sum;
}

struct StatisticsLayout {
  int data, tensor;
  bool sequence;
};

class TensorStatistics : public test::TrainingTest {
 protected:
  // Measures the first step. 32 tokens: no block of tokens is short.
  std::vector<PrecisionEvent> measured(int data, int tensor, bool sequence, const std::vector<std::string>& more) const {
    const std::string name = text("dp", data, "tp", tensor, sequence ? "sp" : "", more.size(), more.front());
    std::vector<std::string> sets;
    sets.insert(sets.end(), {"precision.dtype=bf16", "precision.report_interval=1", "model.hidden_size=128", "model.num_attention_heads=4",
                             "model.intermediate_size=128", "model.max_position_embeddings=32", "training.seq_len=32", "training.steps=1",
                             "training.micro_batch_size=1", "training.grad_accum=null", "training.global_batch_size=4",
                             "training.threads=1", text("parallel.data=", data), text("parallel.tensor=", tensor),
                             text("parallel.sequence_parallel=", sequence ? "true" : "false")});
    sets.insert(sets.end(), more.begin(), more.end());
    const LoadedConfig loaded = config(name, sets);
    EXPECT_THAT(test::run_ranks(data * tensor, [&](const Communicator& world) { run(loaded, {}, world); }), Each(IsEmpty()));
    return read_run_metrics(run_folder(name)).precision;
  }

  // Expects it of each recipe, on one rank and on all layouts.
  void expect_every_block_once(const std::vector<std::vector<std::string>>& recipes, const std::vector<StatisticsLayout>& layouts) const {
    for (const std::vector<std::string>& recipe : recipes) {
      const std::vector<PrecisionEvent> alone = measured(1, 1, false, recipe);
      ASSERT_FALSE(alone.empty());
      for (const auto& [data, tensor, sequence] : layouts) {
        const std::vector<PrecisionEvent> together = measured(data, tensor, sequence, recipe);
        ASSERT_EQ(together.size(), alone.size());
        for (size_t i = 0; i < alone.size(); ++i) {
          const std::string what =
              text(recipe.front(), " tp", tensor, " dp", data, sequence ? " sp " : " ", alone[i].module, ' ', alone[i].role);
          EXPECT_EQ(together[i].module, alone[i].module);
          EXPECT_EQ(together[i].role, alone[i].role);
          EXPECT_EQ(blocks(together[i]), blocks(alone[i])) << what;
          EXPECT_NEAR(*together[i].sqnr_db, *alone[i].sqnr_db, 0.2) << what;
          EXPECT_TRUE(alone[i].role != "weight" || together[i].scales == alone[i].scales) << what;
        }
      }
    }
  }
};

// The last recipe gathers values, which all ranks then quantize, because wgrad reads them beside the codes.
TEST_F(TensorStatistics, CountEveryBlockOnce) {
  const std::string forward = R"(precision.recipes={"forward":{"base":"mxfp8","gemms":["fprop","dgrad"]}})";
  expect_every_block_once({{"precision.recipe=mxfp8"},
                           {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=128"},
                           {"precision.recipe=forward", forward}},
                          {{1, 2, false}, {1, 4, true}, {2, 2, true}});
}

// Rows of 32 tokens hold two examples of 11 or 12 tokens; ranks that share tokens have other padding each.
TEST_F(TensorStatistics, CountNoPadding) {
  std::vector<std::string> recipe = examples();
  recipe.insert(recipe.begin(), "precision.recipe=mxfp8");
  expect_every_block_once({recipe}, {{1, 2, true}, {1, 4, true}, {2, 2, false}});
  const std::vector<PrecisionEvent> alone = read_run_metrics(run_folder(text("dp1tp1", recipe.size(), recipe.front()))).precision;
  ASSERT_FALSE(alone.empty());
  for (const PrecisionEvent& event : alone) {
    if (event.role == "weight") continue;
    const int64_t of_token = event.module.ends_with("qkv") && event.role == "output_grad" ? 12 : 4;
    if (event.module.ends_with("gate_up") && event.role == "output_grad") continue;
    EXPECT_GE(blocks(event), 4 * 22 * of_token) << event.module << ' ' << event.role;
    EXPECT_LE(blocks(event), 4 * 24 * of_token) << event.module << ' ' << event.role;
  }
}

// Every forward pass counts its own blocks of simulated weights.
TEST_F(TensorStatistics, CountEverySimulatedBlockOnceAGemm) {
  const std::string simulated = R"(precision.recipes={"simulated": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
    "weight": {"format": "e3m2", "block": [16, 16]}, "input": {"format": "e2m3", "block": [1, 16]},
    "output_grad": {"format": "e2m1", "block": [1, 32], "rounding": "stochastic"}, "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})";
  expect_every_block_once({{"precision.recipe=simulated", simulated}}, {{1, 2, true}, {2, 2, false}});
}

// Tensor ranks hold a router and what it reads alike.
TEST_F(TensorStatistics, CountARouterOnce) {
  const std::string rule = R"(precision.rules=[{"match":"layers.*.moe.router","recipe":"mxfp8"}])";
  expect_every_block_once({{rule, "model.moe.num_experts=32", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=128"}},
                          {{1, 4, false}, {2, 2, true}});
}

TEST(NonfiniteText, NamesRowAndColumnOfTheWhole) {
  const auto device = make_backend("cpu");
  const auto text_of = [&](const ParameterSpec& whole, Split split, int64_t row, int64_t column) {
    ParameterSet set;
    Parameter& parameter = set.add(sharded(whole, {.split = split, .ranks = {.tensor = 2, .tensor_rank = 1}}));
    set.allocate(*device, Dtype::f32, false);
    const ParameterShard shard{.of = &parameter, .begin = 32, .end = parameter.shape[0]};
    const Tensor values = zeros(*device, Dtype::f32, shard.shape());
    test::set_value(values, (row - 32) * parameter.shape.with_dim0(1).elements() + column, HUGE_VAL);
    return nonfinite_text(shard, values);
  };
  // Rank 1 has rows 64 to 127; of three fused parts of 64, 32 and 32 rows those from 32 to 63, 80 to 95 and 112 to 127.
  EXPECT_EQ(text_of({.name = "up", .shape = {128, 8}}, Split::column_parallel, 40, 3), "up[104, 3] = inf");
  const ParameterSpec fused{.name = "qkv", .shape = {128, 8}, .parts = {64, 32, 32}};
  EXPECT_EQ(text_of(fused, Split::column_parallel, 40, 3), "qkv[88, 3] = inf");
  EXPECT_EQ(text_of(fused, Split::column_parallel, 50, 3), "qkv[114, 3] = inf");
  EXPECT_EQ(text_of({.name = "down", .shape = {64, 8}}, Split::row_parallel, 40, 3), "down[40, 7] = inf");
  EXPECT_EQ(text_of({.name = "norm", .shape = {64}}, Split::none, 40, 0), "norm[40] = inf");
  EXPECT_EQ(text_of({.name = "bias", .shape = {128}, .parts = {64, 32, 32}}, Split::column_parallel, 50, 0), "bias[114] = inf");
  EXPECT_EQ(text_of({.name = "embed", .shape = {128, 8}, .padding = 30}, Split::column_parallel, 60, 3), "embed[124, 3] = inf");
}

}  // namespace mantissa::tensor_statistics_test
