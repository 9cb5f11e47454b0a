// Ranks that share the experts of their layers have the bits of one process under accumulation tree, and load what any other layout saved.
#include <sstream>

#include "training_on_ranks.h"

namespace mantissa::expert_ranks_test {

using test::Sets;
using test::TensorLayout;
using test::TrainedRun;
using test::with;

struct ExpertCase {
  const char* name;
  Sets sets;
  bool examples = false;  // with padding behind them, which no rank routes
};
void PrintTo(const ExpertCase& c, std::ostream* out) { *out << c.name; }

class ExpertRanks : public test::TrainingOnRanks, public ::testing::WithParamInterface<ExpertCase> {
 protected:
  // 19 tokens a sequence; eight experts of which a token takes three; evaluation in 5 batches, which 2 and 4 ranks do not share alike.
  TrainedRun run_at(const TensorLayout& layout, const std::string& name, const Sets& more = {}) const {
    const Sets base = {"model.hidden_size=64",
                       "model.intermediate_size=96",
                       "model.max_position_embeddings=19",
                       "model.moe.num_experts=8",
                       "model.moe.num_experts_per_tok=3",
                       "model.moe.intermediate_size=32",
                       "model.moe.seq_aux_loss_coef=0.01",
                       "model.moe.z_loss_coef=0.001",
                       "training.seq_len=19",
                       "training.steps=4",
                       "schedule.warmup_steps=1",
                       "training.replica_check_interval=1",
                       "eval.interval=2",
                       "eval.iters=5",
                       "checkpoint.interval=2"};
    const Sets data = GetParam().examples ? examples() : Sets();
    return run_on(layout, name, with(with(with(with(base, tree_of(8)), data), GetParam().sets), more));
  }
  // The lines of metrics.jsonl about the routers, step by step.
  std::vector<std::string> routing_lines(const std::string& name) const {
    std::istringstream lines(test::read_file(run_folder(name) + "/metrics.jsonl"));
    std::vector<std::string> out;
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json event = nlohmann::json::parse(line);
      if (event.contains("moe")) out.push_back(event["moe"].dump());
    }
    return out;
  }
  bool has(const std::string& key) const {
    return std::ranges::any_of(GetParam().sets, [&](const std::string& set) { return set.starts_with(key); });
  }
};

TEST_P(ExpertRanks, HaveTheBitsOfOne) {
  const TrainedRun alone = run_at({1, 1, false}, "alone");
  ASSERT_EQ(alone.losses.size(), 4U);
  ASSERT_EQ(alone.valid_losses.size(), 2U);
  EXPECT_NE(alone.losses.back(), alone.losses.front());
  EXPECT_EQ(routing_lines("alone").size(), 4U);
  const bool drops = std::ranges::any_of(alone.steps, [](const StepEvent& step) { return mean_dropped(step.routing) > 0.0; });
  EXPECT_EQ(drops, has("model.moe.capacity_factor=")) << "what is compared below would be 0";
  EXPECT_EQ(alone.steps.front().padding > 0.0, GetParam().examples);
  if (has("model.moe.bias_update_rate=")) {
    EXPECT_NE(tensor("alone", 4, "buffer.layers.1.moe.expert_bias"), std::vector<float>(8, 0.0F));
  }
  expect_same_course(alone, run_at({4, 1, false, 2}, "together"));
  EXPECT_EQ(routing_lines("together"), routing_lines("alone"));
  for (const int64_t step : {2, 4}) expect_same_checkpoints("alone", "together", step);
  const bool all = has("precision.dtype=fp32") || has("model.moe.bias_update_rate=");
  for (const TensorLayout& layout : {TensorLayout{4, 1, false, 4}, {2, 1, false, 2}, {4, 1, false}, {1, 1, false}}) {
    if (layout.expert != 4 && !all) continue;
    SCOPED_TRACE(layout.name());
    const TrainedRun rest = run_at(layout, layout.name(), {"checkpoint.resume=" + checkpoint("together", 2)});
    EXPECT_EQ(rest.valid_losses.back(), alone.valid_losses.back());
    expect_same_checkpoints("alone", layout.name(), 4);
  }
}

// One gradient of an expert over the rows of all ranks: another order of sums than one process has, the same each time.
TEST_P(ExpertRanks, LearnWithoutTheTreeWhatOneLearns) {
  const Sets more = {"training.accumulation=running", "training.steps=3", "eval.interval=0"};
  const TensorLayout layout{4, 1, false, 2};
  const TrainedRun alone = run_at({1, 1, false}, "alone", more), first = run_at(layout, "first", more);
  expect_same_course(first, run_at(layout, "second", more));
  expect_same_checkpoints("first", "second", 3);
  EXPECT_NEAR(first.losses.front(), alone.losses.front(), 1e-12 * alone.losses.front());
  EXPECT_NEAR(first.norms.front(), alone.norms.front(), 1e-3 * alone.norms.front());
  for (size_t i = 0; i < alone.losses.size(); ++i)
    EXPECT_NEAR(first.losses[i], alone.losses[i], 0.02 * alone.losses[i]) << "step " << i + 1;
}

// Recomputation is none, full or selective in some of them.
const std::vector<ExpertCase> kCases = {
    {"fp32", {"precision.dtype=fp32"}},
    {"bias",
     {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=full",
      "model.moe.score=sigmoid", "model.moe.bias_update_rate=0.01", "model.moe.aux_loss_coef=0"}},
    {"gpt_oss",
     {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.moe.router_bias=true", "model.moe.expert_mlp_bias=true",
      "model.moe.softmax_after_topk=true", "model.moe.capacity_factor=1.2", "model.activation=swiglu_clamped", "model.attention_sinks=true",
      "model.sliding_window=7", "model.sliding_layers=[0]"}},
    {"gather", {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=selective"}},
    {"values", {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.quantized_dispatch=false"}},
    {"padded",
     {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.moe.capacity_factor=1.1", "model.moe.score=sigmoid",
      "model.moe.bias_update_rate=0.01", "training.recompute=full"},
     true},
    {"te", {"precision.dtype=bf16", "precision.recipe=mxfp8_te", "training.recompute=selective"}},
    {"qat",
     {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.moe.capacity_factor=1.1", "model.moe.shared_intermediate_size=64",
      "model.moe.dense_layers=[0]", R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"}},
    {"narrow_inputs",
     {"precision.dtype=bf16", "precision.recipe=mxfp4_qat_mxfp4_act", "training.recompute=selective",
      "model.moe.shared_intermediate_size=64"}},
    {"nvfp4", {"precision.dtype=bf16", "precision.recipe=nvfp4_qat_nvfp4_act"}},
    {"simulated",
     {"precision.dtype=bf16", "precision.recipe=own", "training.recompute=full", "model.moe.capacity_factor=1.1",
      R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
          "weight": {"format": "e2m1", "block": [16, 16], "scale": "e4m3", "rounding": "stochastic"},
          "input": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
          "output_grad": {"format": "e3m2", "block": [1, 16], "rounding": "stochastic"},
          "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"}},
    {"fp8_block",
     {"precision.dtype=bf16", "precision.recipe=fp8_block", "model.hidden_size=128", "model.moe.intermediate_size=192",
      "model.intermediate_size=160"}},
    // 2.5 and 1.25 blocks of 32; tokens are dispatched as codes.
    {"odd_blocks",
     {"precision.dtype=bf16", "precision.recipe=mxfp4_qat_mxfp8_act", "model.hidden_size=80", "model.moe.intermediate_size=40",
      "model.moe.shared_intermediate_size=36", "model.moe.capacity_factor=1.1"}},
};

INSTANTIATE_TEST_SUITE_P(, ExpertRanks, ::testing::ValuesIn(kCases), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::expert_ranks_test
