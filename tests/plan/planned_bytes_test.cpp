// What runs on ranks that are threads send in a step, by purpose: to the byte what the cost model says.
#include <gmock/gmock.h>

#include "mantissa/plan/cost.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::planned_bytes_test {

using test::TrainedRun;
using ::testing::Each;
using ::testing::IsEmpty;

struct Grid {
  int data, tensor;
  bool sequence = false;
  int expert = 1;

  std::string name() const { return text("dp", data, "tp", tensor, sequence ? "sp" : "", "ep", expert); }
};

class PlannedBytes : public test::TrainingTest {
 protected:
  void expect(const Grid& grid, std::vector<std::string> sets, const std::string& what) const {
    sets.insert(sets.end(), {text("parallel.data=", grid.data), text("parallel.tensor=", grid.tensor),
                             text("parallel.sequence_parallel=", grid.sequence ? "true" : "false"), text("parallel.expert=", grid.expert),
                             "training.threads=1", "training.steps=3", "training.micro_batch_size=1", "training.grad_accum=2",
                             "training.global_batch_size=null"});
    const std::string name = what + grid.name();
    const LoadedConfig loaded = config(name, sets);
    RunConfig known = loaded.config;
    known.model.vocab_size = 8;
    const StepBytes planned = step_bytes(known, resolve_plan(known));
    Traffic all;
    const auto errors = test::run_ranks(grid.data * grid.tensor, [&](const Communicator& world) {
      const TrainedRun own = run(loaded, {}, world);
      if (world.rank() == 0) all = own.steps.at(2).comm_bytes.value();
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << name;
    EXPECT_EQ(planned.sent.gradients, all.gradients) << name;
    EXPECT_EQ(planned.sent.parameters, all.parameters) << name;
    EXPECT_EQ(planned.sent.activations, all.activations) << name;
    EXPECT_EQ(planned.sent.control, all.control) << name;
    EXPECT_EQ(planned.sent.other, all.other) << name;
    const int64_t mean = (all.gradients + all.parameters + all.activations) / (grid.data * grid.tensor);
    EXPECT_GE(planned.busiest, mean) << name;
    const double most = grid.data > 1 ? 1.25 : 1.1;  // shares of so small a model are uneven
    EXPECT_LT(static_cast<double>(planned.busiest), most * static_cast<double>(mean)) << name;
  }
};

const std::string kRows = R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})";
const std::string kForward = R"(precision.recipes={"forward":{"base":"mxfp8","gemms":["fprop"]}})";

TEST_F(PlannedBytes, OfDataRanksAreSent) {
  for (const int ranks : {2, 4}) {
    const auto check = [&](std::vector<std::string> sets, const char* name) {
      sets.emplace_back("model.intermediate_size=64");
      expect({ranks, 1}, sets, name);
    };
    check({"precision.dtype=fp32"}, "fp32");
    check({"data.eod_id=3", "data.mask_eod_loss=true"}, "masked");
    check({"precision.dtype=bf16", "precision.recipe=mxfp8"}, "values");
    check({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.tie_word_embeddings=true"}, "tiles");
    check({"precision.dtype=bf16", kRows, "precision.recipe=rows", "precision.fp8_param_gather=true"}, "rows");
    check({"model.moe.num_experts=5", "model.moe.intermediate_size=32", "model.moe.shared_intermediate_size=16"}, "experts");
    check({"model.moe.num_experts=5", "model.moe.intermediate_size=32", "model.moe.score=sigmoid", "model.moe.bias_update_rate=1e-3"},
          "biased");
  }
}

class PlannedBytesOf : public PlannedBytes, public ::testing::WithParamInterface<Grid> {};

using PlannedBytesOfTensorRanks = PlannedBytesOf;

// 15 tokens, so shares of them are ragged. Codes travel where a recipe reads them, values where wgrad reads those beside them.
TEST_P(PlannedBytesOfTensorRanks, AreSent) {
  const auto check = [&](std::vector<std::string> sets, const char* name) {
    sets.insert(sets.end(), {"model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=4", "model.qk_norm=true",
                             "training.seq_len=15"});
    expect(GetParam(), sets, name);
  };
  check({"precision.dtype=fp32"}, "fp32");
  check({"precision.dtype=bf16", "model.tie_word_embeddings=true", "model.position=learned", "model.norm=layer", "model.norm_bias=true",
         "model.mlp_bias=true", "model.attention_bias=all", "model.activation=gelu_tanh", "model.qk_norm=false"},
        "gpt2");
  check({"data.eod_id=3", "data.mask_eod_loss=true", "training.recompute=selective"}, "masked");
  check({"precision.dtype=bf16", "precision.recipe=mxfp8"}, "mxfp8");
  check({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=full"}, "gather");
  check({"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=128"}, "output");
  check({"precision.dtype=bf16", kForward, "precision.recipe=forward"}, "forward");
  check({"precision.dtype=bf16", kForward, "precision.recipe=forward", "training.recompute=full"}, "again");
  const std::vector<std::string> experts = {
      "model.moe.num_experts=5", "model.moe.intermediate_size=128", "model.moe.shared_intermediate_size=128", "model.moe.dense_layers=[1]",
      "precision.dtype=bf16",    "precision.recipe=mxfp8"};
  check(experts, "experts");
  std::vector<std::string> again = experts;
  again.insert(again.end(), {"training.recompute=full", "precision.fp8_param_gather=true"});
  check(again, "experts_again");
  std::vector<std::string> biased = experts;
  biased.insert(biased.end(), {"model.moe.router_bias=true", "model.moe.expert_mlp_bias=true", "model.attention_sinks=true"});
  check(biased, "experts_biased");
}

using PlannedBytesOfExpertRanks = PlannedBytesOf;

// With as many rows for each expert: 16 tokens, of which each goes to two of four.
TEST_P(PlannedBytesOfExpertRanks, AreSent) {
  const auto check = [&](std::vector<std::string> sets, const char* name) {
    sets.insert(sets.end(), {"model.hidden_size=64", "model.num_attention_heads=4", "model.intermediate_size=64", "model.moe.num_experts=4",
                             "model.moe.intermediate_size=64", "model.moe.force_balance=true", "model.moe.shared_intermediate_size=64"});
    expect(GetParam(), sets, name);
  };
  check({"precision.dtype=fp32"}, "fp32");
  check({"precision.dtype=bf16", "precision.recipe=mxfp8", "training.accumulation=tree"}, "mxfp8");
  check({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=full"}, "gather");
  check({"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.quantized_dispatch=false"}, "unquantized");
  check({"precision.dtype=bf16", "precision.recipe=mxfp4_qat", "training.recompute=selective"}, "qat");
  // Values, which wgrad reads, but for a forward pass whose input is not kept.
  check({"precision.dtype=bf16", kForward, "precision.recipe=forward"}, "forward");
  check({"precision.dtype=bf16", kForward, "precision.recipe=forward", "training.recompute=full"}, "again");
  check({"precision.dtype=bf16", "precision.recipe=mxfp8", "model.moe.router_bias=true", "model.moe.expert_mlp_bias=true"}, "biased");
}

const auto kName = [](const auto& c) { return c.param.name(); };
INSTANTIATE_TEST_SUITE_P(, PlannedBytesOfTensorRanks,
                         ::testing::Values(Grid{1, 2, false}, Grid{1, 2, true}, Grid{1, 4, false}, Grid{1, 4, true}, Grid{2, 2, false},
                                           Grid{2, 2, true}),
                         kName);
INSTANTIATE_TEST_SUITE_P(, PlannedBytesOfExpertRanks,
                         ::testing::Values(Grid{2, 1, false, 2}, Grid{4, 1, false, 4}, Grid{4, 1, false, 2}, Grid{2, 2, false, 2},
                                           Grid{2, 2, true, 2}),
                         kName);

}  // namespace mantissa::planned_bytes_test
