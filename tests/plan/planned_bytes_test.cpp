// Runs on ranks that are threads send in a step, by purpose, the bytes of the cost model, exactly. Each recipe runs on data ranks, on
// tensor ranks and on ranks that share experts.
#include <gmock/gmock.h>

#include "plan/cost.h"
#include "thread_ranks.h"
#include "training.h"

namespace mantissa::planned_bytes_test {

using test::TrainedRun;
using ::testing::Each;
using ::testing::IsEmpty;
using Sets = std::vector<std::string>;

struct Grid {
  int data, tensor;
  bool sequence = false;
  int expert = 1;
};

struct Named {
  std::string name;
  Sets sets;
};

const std::string kRows = R"(precision.recipes={"rows":{"base":"mxfp8","weight":{"block":[1,32]}}})";
const std::string kForward = R"(precision.recipes={"forward":{"base":"mxfp8","gemms":["fprop"]}})";

const std::vector<Named> kRecipes = {
    {"fp32", {"precision.dtype=fp32"}},
    {"tree", {"precision.recipe=mxfp8", "training.accumulation=tree"}},
    {"selective", {"precision.recipe=mxfp8", "training.recompute=selective"}},
    {"gather", {"precision.recipe=mxfp8", "precision.fp8_param_gather=true", "training.recompute=full"}},
    {"rows", {kRows, "precision.recipe=rows", "precision.fp8_param_gather=true"}},
    {"output", {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=128"}},
    {"qat", {"precision.recipe=mxfp4_qat"}},
    {"unquantized", {"precision.recipe=mxfp8", "precision.quantized_dispatch=false"}},
    // Codes travel where a recipe reads them, and values where wgrad reads those beside them: not for a forward pass that keeps no input.
    {"forward", {kForward, "precision.recipe=forward"}},
    {"again", {kForward, "precision.recipe=forward", "training.recompute=full"}},
    {"muon", {"optimizer.type=muon"}},
};

Sets experts(Sets more) {
  more.insert(more.end(), {"model.moe.num_experts=5", "model.moe.intermediate_size=128", "model.moe.shared_intermediate_size=128"});
  return more;
}

const std::vector<Named> kDense = {
    {"qwen3", {}},
    {"tied", {"model.tie_word_embeddings=true"}},
    {"gpt2",
     {"model.position=learned", "model.norm=layer", "model.norm_bias=true", "model.mlp_bias=true", "model.attention_bias=all",
      "model.activation=gelu_tanh", "model.qk_norm=false"}},
    {"masked", {"data.eod_id=3", "data.mask_eod_loss=true"}},
    {"frozen", {R"(optimizer.rules=[{"match": "layers.*.attn.*", "lr_factor": 0}, {"match": "embed", "lr_factor": 0}])"}},
};
const std::vector<Named> kExperts = {
    {"experts", experts({})},
    {"dense_layer", experts({"model.moe.dense_layers=[1]"})},
    {"biased", experts({"model.moe.router_bias=true", "model.moe.expert_mlp_bias=true", "model.attention_sinks=true"})},
    {"steered", experts({"model.moe.score=sigmoid", "model.moe.bias_update_rate=1e-3"})},
    {"frozen",
     experts({R"(optimizer.rules=[{"match": "layers.0.moe.experts.*", "lr_factor": 0}, {"match": "layers.1.*", "lr_factor": 0}])"})},
};

class PlannedBytes : public test::TrainingTest {
 protected:
  // 15 tokens, so that shares of them are ragged; ranks that share experts have as many rows for each: 16 tokens, each for two of four.
  void expect(const Grid& grid, const Named& recipe, const Named& model) const {
    const std::string name = text(recipe.name, '_', model.name, "_dp", grid.data, "tp", grid.tensor, grid.sequence, "ep", grid.expert);
    Sets sets = {"model.hidden_size=128", "model.intermediate_size=128", "model.num_attention_heads=4", "precision.dtype=bf16"};
    sets.insert(sets.end(), recipe.sets.begin(), recipe.sets.end());
    sets.insert(sets.end(), model.sets.begin(), model.sets.end());
    sets.insert(sets.end(), {text("parallel.data=", grid.data), text("parallel.tensor=", grid.tensor), "training.global_batch_size=null",
                             text("parallel.sequence_parallel=", grid.sequence ? "true" : "false"), text("parallel.expert=", grid.expert),
                             "training.threads=1", "training.steps=2", "training.micro_batch_size=1", "training.grad_accum=2",
                             text("training.seq_len=", grid.expert > 1 ? 16 : 15)});
    if (grid.expert > 1) sets.insert(sets.end(), {"model.moe.num_experts=4", "model.moe.force_balance=true"});
    const LoadedConfig loaded = config(name, sets);
    RunConfig known = loaded.config;
    known.model.vocab_size = 8;
    const StepBytes planned = step_bytes(known, resolve_plan(known));
    Traffic all;
    const auto errors = test::run_ranks(grid.data * grid.tensor, [&](const Communicator& world) {
      const TrainedRun own = run(loaded, {}, world);
      if (world.rank() == 0) all = own.steps.at(1).comm_bytes.value();
    });
    EXPECT_THAT(errors, Each(IsEmpty())) << name;
    const auto numbers = [](const Traffic& of) { return std::vector{of.gradients, of.parameters, of.activations, of.control, of.other}; };
    EXPECT_EQ(numbers(planned.sent), numbers(all)) << name;
    if (model.name.starts_with("frozen")) return;  // ranks own parts of equal size, of which more or less is trained
    const int64_t mean = (all.gradients + all.parameters + all.activations) / (grid.data * grid.tensor);
    EXPECT_GE(planned.busiest, mean) << name;
    const double most = grid.data > 1 ? 1.25 : 1.1;  // shares of so small a model are uneven
    EXPECT_LT(static_cast<double>(planned.busiest), most * static_cast<double>(mean)) << name;
  }

  // Each recipe once, while layouts and models take turns.
  void expect_on(const std::vector<Grid>& grids, const std::vector<Named>& models) const {
    for (size_t i = 0; i < kRecipes.size(); ++i) {
      const bool untied = kRecipes[i].name == "output";  // which has an output projection of its own
      expect(grids[i % grids.size()], kRecipes[i], untied ? models.front() : models[3 * i % models.size()]);
    }
  }

  static std::vector<Named> all_models() {
    std::vector<Named> out = kDense;
    out.insert(out.end(), kExperts.begin(), kExperts.end());
    return out;
  }
};

TEST_F(PlannedBytes, OfDataRanksAreSent) { expect_on({{2, 1}, {4, 1}}, all_models()); }

TEST_F(PlannedBytes, OfTensorRanksAreSent) { expect_on({{1, 2}, {1, 2, true}, {1, 4}, {1, 4, true}, {2, 2}, {2, 2, true}}, all_models()); }

TEST_F(PlannedBytes, OfRanksThatShareExpertsAreSent) {
  expect({4, 1, false, 2}, kRecipes.back(), kExperts.front());
  expect_on({{2, 1, false, 2}, {4, 1, false, 4}, {4, 1, false, 2}, {2, 2, false, 2}, {2, 2, true, 2}}, kExperts);
}

// Ranks that share experts have buckets of their own for these: nothing of them is trained, or one of two weights.
TEST_F(PlannedBytes, OfFrozenExpertsAreSent) {
  const Named half{"frozen_half", experts({R"(optimizer.rules=[{"match": "layers.*.moe.experts.gate_up", "lr_factor": 0}])"})};
  for (const Named& model : {kExperts.back(), half}) expect({4, 1, false, 2}, kRecipes.front(), model);
}

}  // namespace mantissa::planned_bytes_test
