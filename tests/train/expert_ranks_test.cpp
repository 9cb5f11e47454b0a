// Ranks that share the experts of their layers have the bits of one process under accumulation tree.
#include <sstream>

#include "training_on_ranks.h"

namespace mantissa::expert_ranks_test {

using test::TrainedRun;

struct ExpertLayout {
  int data, expert;
  std::string name() const { return text("dp", data, "ep", expert); }
};
const std::vector<ExpertLayout> kLayouts = {{2, 2}, {4, 4}, {4, 2}};

struct ExpertCase {
  const char* name;
  std::vector<std::string> sets;
};

class ExpertRanks : public test::TrainingOnRanks, public ::testing::WithParamInterface<ExpertCase> {
 protected:
  // 19 tokens a sequence; eight experts of which a token takes three; evaluation in 5 batches, which 2 and 4 ranks do not share alike.
  std::vector<std::string> sets(const std::vector<std::string>& more) const {
    std::vector<std::string> out = {"model.hidden_size=64",
                                    "model.intermediate_size=96",
                                    "model.max_position_embeddings=19",
                                    "model.moe.num_experts=8",
                                    "model.moe.num_experts_per_tok=3",
                                    "model.moe.intermediate_size=32",
                                    "model.moe.seq_aux_loss_coef=0.01",
                                    "model.moe.z_loss_coef=0.001",
                                    "training.seq_len=19",
                                    "training.micro_batch_size=1",
                                    "training.grad_accum=null",
                                    "training.global_batch_size=8",
                                    "training.accumulation=tree",
                                    "training.threads=1",
                                    "training.replica_check_interval=5",
                                    "eval.interval=10",
                                    "eval.iters=5",
                                    "checkpoint.interval=10"};
    out.insert(out.end(), GetParam().sets.begin(), GetParam().sets.end());
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  TrainedRun run_at(const ExpertLayout& layout, const std::string& name, std::vector<std::string> more = {}) const {
    more.push_back(text("parallel.expert=", layout.expert));
    return run_on(layout.data, name, sets(more));
  }
  // What metrics.jsonl says of the routers, step by step.
  std::vector<std::string> routing_lines(const std::string& name) const {
    std::istringstream lines(test::read_file(run_folder(name) + "/metrics.jsonl"));
    std::vector<std::string> out;
    for (std::string line; std::getline(lines, line);) {
      const nlohmann::json event = nlohmann::json::parse(line);
      if (event.contains("moe")) out.push_back(event["moe"].dump());
    }
    return out;
  }
};

bool drops(const TrainedRun& run) {
  return std::ranges::any_of(run.steps, [](const StepEvent& step) { return mean_dropped(step.routing) > 0.0; });
}

bool limits_experts(const ExpertCase& c) {
  return std::ranges::any_of(c.sets, [](const std::string& set) { return set.starts_with("model.moe.capacity_factor="); });
}

TEST_P(ExpertRanks, HaveTheBitsOfOne) {
  const TrainedRun alone = run_at({1, 1}, "alone");
  ASSERT_EQ(alone.losses.size(), 20U);
  ASSERT_EQ(alone.valid_losses.size(), 2U);
  EXPECT_LT(alone.losses.back(), alone.losses.front());
  EXPECT_EQ(routing_lines("alone").size(), 20U);
  EXPECT_EQ(drops(alone), limits_experts(GetParam())) << "what is compared below would be 0";
  for (const ExpertLayout& layout : kLayouts) {
    SCOPED_TRACE(layout.name());
    const TrainedRun together = run_at(layout, layout.name());
    expect_same_course(alone, together);
    EXPECT_EQ(routing_lines(layout.name()), routing_lines("alone"));
    expect_same_checkpoints("alone", layout.name(), 20);
  }
}

// One gradient of an expert over the rows of all ranks: another order of sums than one process has, the same each time.
TEST_P(ExpertRanks, LearnWithoutTheTreeWhatOneLearns) {
  const std::vector<std::string> more = {"training.accumulation=running", "training.steps=6"};
  const TrainedRun alone = run_at({1, 1}, "alone", more), first = run_at({4, 2}, "first", more), second = run_at({4, 2}, "second", more);
  expect_same_course(first, second);
  expect_same_checkpoints("first", "second", 6);
  EXPECT_NEAR(first.losses.front(), alone.losses.front(), 1e-12 * alone.losses.front());
  EXPECT_NEAR(first.norms.front(), alone.norms.front(), 1e-3 * alone.norms.front());
  for (size_t i = 0; i < alone.losses.size(); ++i)
    EXPECT_NEAR(first.losses[i], alone.losses[i], 0.02 * alone.losses[i]) << "step " << i + 1;
}

TEST_P(ExpertRanks, ContinueWhatAnyOtherLayoutSaved) {
  run_at({4, 2}, "first");
  for (const ExpertLayout& layout : {ExpertLayout{2, 2}, ExpertLayout{1, 1}, ExpertLayout{4, 4}, ExpertLayout{4, 1}}) {
    SCOPED_TRACE(layout.name());
    const std::string name = "on" + layout.name();
    run_at(layout, name, {"checkpoint.resume=" + checkpoint("first", 10)});
    expect_same_checkpoints("first", name, 20);
  }
}

const std::vector<ExpertCase> kCases = {
    {"fp32", {"precision.dtype=fp32"}},
    {"bf16", {"precision.dtype=bf16", "training.recompute=full"}},
    {"mxfp8", {"precision.dtype=bf16", "precision.recipe=mxfp8", "training.recompute=selective"}},
    {"bias", {"precision.dtype=bf16", "model.moe.score=sigmoid", "model.moe.bias_update_rate=0.01", "model.moe.aux_loss_coef=0"}},
    {"gpt_oss",
     {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.moe.router_bias=true", "model.moe.expert_mlp_bias=true",
      "model.moe.softmax_after_topk=true", "model.moe.capacity_factor=1.2", "model.activation=swiglu_clamped", "model.attention_sinks=true",
      "model.sliding_window=7", "model.sliding_layers=[0]"}},
    {"gather", {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true"}},
    {"values", {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.quantized_dispatch=false"}},
    {"te", {"precision.dtype=bf16", "precision.recipe=mxfp8_te", "training.recompute=selective"}},
    {"qat",
     {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.moe.capacity_factor=1.1", "model.moe.shared_intermediate_size=64",
      "model.moe.dense_layers=[0]", R"(precision.rules=[{"match":"layers.*.moe.experts.*","recipe":"mxfp4_qat_mxfp8_act"}])"}},
    {"simulated",
     {"precision.dtype=bf16", "precision.recipe=own", "training.recompute=full", "model.moe.capacity_factor=1.1",
      R"(precision.recipes={"own": {"gemms": ["fprop", "dgrad", "wgrad"], "simulate": {
          "weight": {"format": "e2m1", "block": [16, 16], "scale": "e4m3", "rounding": "stochastic"},
          "input": {"format": "e2m1", "block": [1, 16], "scale": "e4m3", "rounding": "stochastic"},
          "output_grad": {"format": "e3m2", "block": [1, 16], "rounding": "stochastic"},
          "hadamard": 16, "hadamard_gemms": ["wgrad"]}}})"}},
    {"fp8_block",
     {"precision.dtype=bf16", "precision.recipe=fp8_block", "model.hidden_size=128", "model.moe.intermediate_size=128",
      "model.intermediate_size=128"}},
};

INSTANTIATE_TEST_SUITE_P(, ExpertRanks, ::testing::ValuesIn(kCases), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::expert_ranks_test
