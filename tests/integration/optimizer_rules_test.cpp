// optimizer.rules: modules that are frozen or trained at another rate. What is trained beside a frozen module gets the gradients that it
// has without; a frozen one keeps its bits and has no moments, gradients, norm or exchange.
#include <gmock/gmock.h>

#include "hf/export.h"
#include "hf/load_model.h"
#include "mantissa/base/log.h"
#include "plan/cost.h"
#include "train/evaluate.h"
#include "training_on_ranks.h"

namespace mantissa::optimizer_rules_test {

using test::error_of;
using test::Sets;
using test::TensorLayout;
using test::TrainedRun;
using test::with;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const TensorLayout kAlone{1, 1, false};

std::string freeze(const std::vector<std::string>& patterns) {
  return "optimizer.rules=[" +
         joined(patterns, ", ", [](const std::string& match) { return R"({"match": ")" + match + R"(", "lr_factor": 0})"; }) + "]";
}

class OptimizerRules : public test::TrainingOnRanks {
 protected:
  // One step without clipping, whose factor would be that of the other gradients too.
  static Sets one_step(const Sets& more) {
    return with({"training.steps=1", "schedule.warmup_steps=0", "optimizer.grad_clip=0", "model.hidden_size=64",
                 "model.intermediate_size=64", "model.num_attention_heads=4", "model.num_key_value_heads=2"},
                more);
  }
  bool has(const std::string& name, int64_t step, const std::string& tensor) const {
    const CheckpointReader reader(checkpoint(name, step));
    return std::ranges::any_of(reader.manifest().tensors, [&](const ManifestTensor& saved) { return saved.name == tensor; });
  }
  // Requires that of one step from the same start, all that `is_frozen` tells stays, and all else becomes what it becomes without a rule.
  void expect_one_step(const std::string& name, const Sets& sets, const std::vector<std::string>& patterns,
                       const std::function<bool(const std::string&)>& is_frozen) const {
    SCOPED_TRACE(name);
    run(name + "-all", one_step(sets));
    const TrainedRun trained =
        run(name, one_step(with(sets, {freeze(patterns), "eval.first=true", "checkpoint.keep_best=true"})));  // which saves the start
    int stayed = 0, moved = 0;
    for (const std::string& parameter : parameters(name, 1)) {
      const std::vector<float> found = tensor(name, 1, "master." + parameter);
      const bool frozen = is_frozen(parameter);
      EXPECT_EQ(found, tensor(frozen ? name : name + "-all", frozen ? 0 : 1, "master." + parameter)) << parameter;
      EXPECT_EQ(has(name, 1, "m." + parameter), !is_frozen(parameter)) << parameter;
      EXPECT_EQ(has(name, 1, "v." + parameter), !is_frozen(parameter)) << parameter;
      if (!is_frozen(parameter)) {
        EXPECT_EQ(tensor(name, 1, "m." + parameter), tensor(name + "-all", 1, "m." + parameter)) << parameter;
      }
      ++(is_frozen(parameter) ? stayed : moved);
    }
    EXPECT_GT(stayed, 0);
    EXPECT_GT(moved, 0);
    EXPECT_GT(trained.norms[0], 0.0);
  }
};

bool in(const std::string& parameter, const std::string& part) { return parameter.find(part) != std::string::npos; }

TEST_F(OptimizerRules, FreezeModulesAndLeaveTheGradientsOfOthersAsTheyAre) {
  const Sets experts = {"model.moe.num_experts=4",        "model.moe.num_experts_per_tok=2",
                        "model.moe.intermediate_size=64", "model.moe.shared_intermediate_size=64",
                        "model.moe.router_bias=true",     "model.moe.expert_mlp_bias=true",
                        "model.attention_sinks=true"};
  const Sets gpt2 = {"model.position=learned", "model.norm=layer",         "model.norm_bias=true",      "model.mlp_bias=true",
                     "model.qk_norm=false",    "model.attention_bias=all", "model.activation=gelu_tanh"};
  expect_one_step("mlp", {}, {"layers.*.mlp.*"}, [](const auto& p) { return in(p, ".mlp."); });
  expect_one_step(
      "norms", {"model.tie_word_embeddings=true"}, {"layers.*.attn_norm", "layers.1.attn.q_norm", "final_norm", "embed"},
      [](const auto& p) { return in(p, "attn_norm") || in(p, "layers.1.attn.q_norm") || in(p, "final_norm") || in(p, "embed"); });
  expect_one_step("gpt2", gpt2, {"layers.*.{attn,mlp}_norm", "position", "layers.*.attn.*"},
                  [](const auto& p) { return in(p, "layers.") ? !in(p, ".mlp.") : in(p, "position"); });
  expect_one_step("experts", experts, {"layers.0.moe.*", "layers.*.attn.sinks"},
                  [](const auto& p) { return in(p, "layers.0.moe.") || in(p, "sinks"); });
  expect_one_step("router", experts, {"layers.*.moe.router", "layers.*.moe.shared.*"},
                  [](const auto& p) { return in(p, "router") || in(p, "shared"); });
}

// Nothing that is trained lies before the frozen layers, so no gradient reaches them.
TEST_F(OptimizerRules, FreezeTheFirstLayersUnderEveryRecomputation) {
  for (const std::string recompute : {"none", "selective", "full"}) {
    expect_one_step("first-" + recompute, {"training.recompute=" + recompute}, {"embed", "layers.0.*"},
                    [](const auto& p) { return in(p, "embed") || in(p, "layers.0."); });
    expect_one_step("head-" + recompute, {"training.recompute=" + recompute}, {"output", "final_norm", "layers.1.*"},
                    [](const auto& p) { return in(p, "output") || in(p, "final_norm") || in(p, "layers.1."); });
  }
}

TEST_F(OptimizerRules, FreezeQuantizedWeights) {
  for (const std::string recipe : {"mxfp8", "mxfp8_te", "mxfp4_qat", "mxfp8_weights"})
    expect_one_step(recipe, {"precision.dtype=bf16", "precision.recipe=" + recipe}, {"layers.0.mlp.*", "layers.1.attn.qkv"},
                    [](const auto& p) { return in(p, "layers.0.mlp.") || in(p, "layers.1.attn.qkv"); });
}

TEST_F(OptimizerRules, ScaleTheLearningRateAndReplaceTheDecay) {
  const Sets rate = {"optimizer.lr=1e-2", "optimizer.weight_decay=0.5"};
  run("all", one_step(rate));
  run("half", one_step(with(rate, {"optimizer.lr=5e-3"})));
  run("twice", one_step(with(rate, {"optimizer.lr=2e-2"})));
  run("plain", one_step(with(rate, {"optimizer.weight_decay=0.25"})));
  run("rules", one_step(with(rate, {R"(optimizer.rules=[{"match": "layers.0.attn.qkv", "lr_factor": 0.5},
      {"match": "layers.0.*", "weight_decay": 0.25}, {"match": "output", "lr_factor": 0.5},
      {"match": "layers.1.mlp.*", "lr_factor": 2}])"})));
  for (const std::string& parameter : parameters("rules", 1)) {
    const bool half = in(parameter, "layers.0.attn.qkv") || in(parameter, "output");
    const std::string as = half ? "half" : in(parameter, "layers.1.mlp.") ? "twice" : in(parameter, "layers.0.") ? "plain" : "all";
    EXPECT_EQ(tensor("rules", 1, "master." + parameter), tensor(as, 1, "master." + parameter)) << parameter;
    if (in(parameter, "weight") && as != "all" && !in(parameter, "norm")) {
      EXPECT_NE(tensor("rules", 1, "master." + parameter), tensor("all", 1, "master." + parameter)) << parameter;
    }
  }
}

TEST_F(OptimizerRules, ScaleEachStepOfTheScheduleWithItsClipping) {
  const Sets sets = {"training.steps=8", "optimizer.grad_clip=0.5", "schedule.warmup_steps=3"};
  const TrainedRun half = run("half", with(sets, {"optimizer.lr=5e-3"}));
  const TrainedRun rules = run("rules", with(sets, {"optimizer.lr=1e-2", R"(optimizer.rules=[{"match": "*", "lr_factor": 0.5}])"}));
  EXPECT_GT(half.norms[0], 0.5) << "else nothing is clipped";
  expect_same_course(half, rules);
  expect_same_checkpoints("half", "rules", 8);
}

TEST_F(OptimizerRules, KeepTheNormToWhatIsTrained) {
  const TrainedRun all = run("all", one_step({})), frozen = run("frozen", one_step({freeze({"embed", "output", "layers.0.*"})}));
  EXPECT_EQ(frozen.losses, all.losses);
  EXPECT_LT(frozen.norms[0], all.norms[0]);
  const TrainedRun rest = run("rest", one_step({freeze({"layers.1.*", "final_norm"})}));
  EXPECT_NEAR(std::hypot(frozen.norms[0], rest.norms[0]), all.norms[0], 1e-6 * all.norms[0]) << "each has what the other lacks";
}

// ---- checkpoints

TEST_F(OptimizerRules, AreResumedBitwiseAndExported) {
  const Sets sets = {"training.steps=6",           freeze({"layers.0.*"}), "model.hidden_size=64",
                     "model.intermediate_size=64", "precision.dtype=bf16", "precision.recipe=mxfp4_qat"};
  const TrainedRun straight = run("straight", sets);
  run("cut", with(sets, {"training.steps=3", "schedule.decay_steps=1"}));
  const TrainedRun rest = run("cut", with(sets, {"training.steps=6", "schedule.decay_steps=1", "checkpoint.resume=auto"}));
  const TrainedRun whole = run("whole", with(sets, {"schedule.decay_steps=1"}));
  expect_same_checkpoints("whole", "cut", 6, "state");  // one evaluated when it was cut
  EXPECT_TRUE(test::same_elements(rest.losses, std::vector<double>(whole.losses.begin() + 3, whole.losses.end())));
  EXPECT_TRUE(test::same_elements(rest.norms, std::vector<double>(whole.norms.begin() + 3, whole.norms.end())));
  for (const std::string& parameter : parameters("cut", 6)) {
    const bool stays = in(parameter, "layers.0.");
    EXPECT_EQ(tensor("cut", 6, "master." + parameter) == tensor("cut", 3, "master." + parameter), stays) << parameter;
    EXPECT_EQ(has("cut", 6, "v." + parameter), !stays) << parameter;
  }
  // The export has the loss that the run had at its end, and is what forward multiplies by in frozen modules, too.
  const ExportOptions packed{.weights = ExportWeights::packed};
  export_model(checkpoint("straight", 6), folder_ / "packed", packed, make_backend("cpu"));
  const LoadedModel exported = load_model(folder_ / "packed", make_backend("cpu"));
  const Data data = open_data(config("data", sets).config.data, {.seq_len = 16});
  EXPECT_EQ(evaluate(*exported.model, data.valid, 4, 2).loss, straight.valid_losses.back());
  ModelExport of_checkpoint(checkpoint("straight", 6), packed, make_backend("cpu"));
  HfWeights folder(folder_ / "packed");
  EXPECT_EQ(export_difference(folder, of_checkpoint.weights()), std::nullopt);
  EXPECT_EQ(compare_codes(folder, of_checkpoint.weights()).difference, std::nullopt);
  run("next", with(sets, {"training.steps=1", "checkpoint.init_from=" + checkpoint("straight", 6), "optimizer.rules=[]"}));
  EXPECT_TRUE(has("next", 1, "m.layers.0.mlp.down.weight"));
  EXPECT_NE(tensor("next", 1, "master.layers.0.mlp.down.weight"), tensor("straight", 6, "master.layers.0.mlp.down.weight"));
}

TEST_F(OptimizerRules, OfAResumeMayFreezeMoreAndNotLess) {
  const Sets sets = {"training.steps=2", freeze({"layers.0.mlp.*"})};
  run("run", sets);
  const Sets more = with(sets, {"training.steps=3", "checkpoint.resume=auto"});
  const Error error = error_of([&] { run("run", with(more, {freeze({"layers.0.mlp.down"})})); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("optimizer.rules: layers.0.mlp.gate_up is trained here, but was frozen in "));
  EXPECT_THAT(error_of([&] { preview_run(config("run", with(more, {"optimizer.rules=[]"}))); }).what(), HasSubstr("was frozen in "));
  run("run", with(more, {freeze({"layers.*.mlp.*"})}));
  EXPECT_EQ(tensor("run", 3, "master.layers.1.mlp.down.weight"), tensor("run", 2, "master.layers.1.mlp.down.weight"));
  EXPECT_FALSE(has("run", 3, "m.layers.1.mlp.down.weight"));
}

// ---- ranks

TEST_F(OptimizerRules, AreTheSameOnDataRanksBitForBit) {
  for (const Sets& recipe : {Sets{"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}, Sets{"precision.recipe=mxfp4_qat"}}) {
    const std::string name = recipe[0].substr(17);
    const Sets sets =
        with(with(tree_of(4), recipe), {"precision.dtype=bf16", "model.hidden_size=128", "model.intermediate_size=128",
                                        "model.num_attention_heads=4", "training.steps=3", "training.replica_check_interval=1",
                                        freeze({"embed", "layers.0.attn.*", "layers.*.mlp.gate_up", "layers.1.mlp_norm"})});
    const TrainedRun alone = run_on(kAlone, name + "1", sets);
    for (const int ranks : {2, 4}) {
      expect_same_course(alone, run_on(ranks, text(name, ranks), sets));
      expect_same_checkpoints(name + "1", text(name, ranks), 3);
    }
  }
}

// Codes are the frozen weight: they are gathered once, and must stay those of its master on every rank, also in a bucket that has nothing
// else, and where a run goes on with another number of ranks.
TEST_F(OptimizerRules, LeaveTheCodesOfFrozenWeightsOnEveryLayout) {
  const std::vector<std::string> frozen = {"layers.0.*", "layers.1.mlp.gate_up", "output"};
  const Sets sets =
      with(tree_of(4), {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_param_gather=true", "model.hidden_size=128",
                        "model.intermediate_size=128", "model.num_attention_heads=4", "training.steps=3", "eval.first=true",
                        "checkpoint.keep_best=true", "checkpoint.keep_every=1", "training.replica_check_interval=1", freeze(frozen)});
  const TrainedRun alone = run_on(kAlone, "alone", sets);
  const auto is_frozen = [](const std::string& p) { return in(p, "layers.0.") || in(p, "layers.1.mlp.gate_up") || in(p, "output"); };
  for (const TensorLayout& layout :
       {kAlone, TensorLayout{2, 1, false}, TensorLayout{4, 1, false}, TensorLayout{1, 2, false}, TensorLayout{2, 2, true}}) {
    const std::string name = "layout" + layout.name();
    SCOPED_TRACE(name);
    const TrainedRun found = run_on(layout, name, sets);
    if (layout.tensor == 1) expect_same_course(alone, found);
    EXPECT_NEAR(found.losses.back(), alone.losses.back(), 2e-2);
    const auto expect_stay = [&](int64_t step) {
      CheckpointReader reader(checkpoint(name, step));
      EXPECT_GT(verify_codes(reader, *make_backend("cpu")), 0) << "codes of " << step << " are those of the masters";
      for (const std::string& parameter : parameters(name, step)) {
        const bool same = tensor(name, step, "master." + parameter) == tensor("alone", 0, "master." + parameter);
        EXPECT_EQ(same, is_frozen(parameter)) << parameter << " of step " << step;
        EXPECT_EQ(has(name, step, "m." + parameter), !is_frozen(parameter)) << parameter;
      }
    };
    expect_stay(3);
    run_on(layout.ranks() == 2 ? kAlone : TensorLayout{2, 1, false}, name, with(sets, {"training.steps=4", "checkpoint.resume=auto"}));
    expect_stay(4);
  }
}

TEST_F(OptimizerRules, AreTheSameOnRanksThatShareExpertsBitForBit) {
  const Sets sets =
      with(tree_of(4), {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.hidden_size=128", "model.num_attention_heads=4",
                        "model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64", "training.steps=2",
                        freeze({"layers.*.moe.experts.gate_up", "layers.0.moe.*", "output"})});
  const TrainedRun alone = run_on(kAlone, "alone", sets);
  for (const TensorLayout& layout : {TensorLayout{2, 1, false, 2}, TensorLayout{4, 1, false, 2}}) {
    expect_same_course(alone, run_on(layout, layout.name(), sets));
    expect_same_checkpoints("alone", layout.name(), 2);
  }
}

TEST_F(OptimizerRules, AreTheSameOnTensorRanksUpToTheOrderOfSums) {
  const Sets sets =
      with(tree_of(2), {"model.hidden_size=64", "model.intermediate_size=64", "model.num_attention_heads=4", "training.steps=3",
                        "training.replica_check_interval=1", freeze({"embed", "layers.0.attn.*", "layers.1.*_norm"})});
  const TrainedRun alone = run_on(kAlone, "alone", sets);
  for (const TensorLayout& layout : {TensorLayout{1, 2, false}, TensorLayout{1, 2, true}, TensorLayout{2, 2, true}}) {
    SCOPED_TRACE(layout.name());
    const TrainedRun run = run_on(layout, layout.name(), sets);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(run.losses[i], alone.losses[i], 1e-5);
      EXPECT_NEAR(run.norms[i], alone.norms[i], 1e-4 * alone.norms[i]);
    }
    EXPECT_EQ(tensor(layout.name(), 3, "master.layers.0.attn.qkv.weight"), tensor("alone", 3, "master.layers.0.attn.qkv.weight"));
    EXPECT_NE(tensor(layout.name(), 3, "master.layers.0.mlp.down.weight"), tensor(layout.name(), 3, "master.layers.1.mlp.down.weight"));
    EXPECT_FALSE(has(layout.name(), 3, "m.layers.0.attn.qkv.weight"));
  }
}

// ---- refusals

TEST_F(OptimizerRules, ThatReachNothingOrLeaveNothingAreRefused) {
  const auto refusal = [&](const std::string& rules) {
    const Error error = error_of([&] { config("refused", {"optimizer.rules=" + rules}); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(refusal(R"([{"match": "layers.*.mpl.*"}])"),
              HasSubstr("optimizer.rules.0.match: \"layers.*.mpl.*\" matches no module; nearest: \"layers.*.mlp.*\""));
  EXPECT_THAT(refusal(R"([{"match": "embed.weight"}])"), HasSubstr("matches no module; nearest modules: "));
  EXPECT_THAT(refusal(R"([{"match": "layers.7.*"}])"), HasSubstr("names layer 7, but the model has 2 layers"));
  EXPECT_THAT(refusal(R"([{"match": "*"}, {"match": "output"}])"),
              HasSubstr("optimizer.rules.1.match: \"output\" can never be reached: all its modules are taken by optimizer.rules.0 \"*\""));
  EXPECT_THAT(refusal(R"([{"match": "layers.*", "lr_factor": 0}, {"match": "*", "lr_factor": 0}])"),
              HasSubstr("optimizer.rules: freeze every module, so nothing is trained"));
  EXPECT_THAT(refusal(R"([{"match": "embed", "lr_factor": 0, "weight_decay": 0.1}])"),
              HasSubstr("optimizer.rules.0.weight_decay: does nothing, because lr_factor 0 freezes these modules"));
  EXPECT_THAT(
      refusal(R"([{"match": "layers.*.attn_norm", "weight_decay": 0.1}])"),
      HasSubstr("optimizer.rules.0.weight_decay: does nothing, because \"layers.*.attn_norm\" takes layers.0.attn_norm and 1 more, and "
                "norms, sinks and biases do not decay"));
  EXPECT_THAT(refusal(R"([{"match": "embed"}, {"match": "final_norm", "weight_decay": 0}])"),
              HasSubstr("optimizer.rules.1.weight_decay: does nothing, because \"final_norm\" takes final_norm, and norms"));
  EXPECT_THAT(refusal(R"([{"match": "layers.*.mlp.*"}, {"match": "layers.*.mlp*", "weight_decay": 0}])"),
              HasSubstr("optimizer.rules.1.weight_decay: does nothing, because \"layers.*.mlp*\" takes layers.0.mlp_norm and 1 more"))
      << "an earlier rule has the matrices";
  EXPECT_NO_THROW(config("mixed", {R"(optimizer.rules=[{"match": "layers.0.*", "weight_decay": 0.1}])"}));
  EXPECT_THAT(refusal(R"([{"match": "embed", "lr_factor": -1}])"), HasSubstr("optimizer.rules.0.lr_factor: must be "));
  EXPECT_NO_THROW(config("accepted", {R"(optimizer.rules=[{"match": "layers.*.mlp.*"}, {"match": "*", "lr_factor": 0}])"}));
  std::string many = R"([{"match": "*"})";
  for (int i = 0; i < 1000; ++i) many += R"(, {"match": "embed"})";
  EXPECT_THAT(refusal(many + "]"), HasSubstr("optimizer.rules: has 1001 rules, at most 1000 are accepted"));
}

// wgrad alone reads what the experts multiply, permuted tokens and activations, which are kept for it.
TEST_F(OptimizerRules, KeepNoInputsOfFrozenExperts) {
  const Sets experts = {"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64",
                        "model.hidden_size=64", "precision.dtype=bf16"};
  const auto kept = [&](const std::string& name, const Sets& more) {
    return preview_run(config(name, with(experts, more))).memory.activations;
  };
  const int64_t tokens = 4 * 16, rows = 2 * tokens, layers = 2;
  const std::string gate_up = freeze({"layers.*.moe.experts.gate_up"}), down = freeze({"layers.*.moe.experts.down"});
  for (const std::string recipe : {"high", "mxfp8"}) {
    const Sets sets = {"precision.recipe=" + recipe};
    const int64_t all = kept("all" + recipe, sets), bytes = recipe == "high" ? 2 : 1;
    EXPECT_GE(all - kept("gate_up" + recipe, with(sets, {gate_up})), layers * rows * 64 * bytes) << recipe;
    EXPECT_GE(all - kept("down" + recipe, with(sets, {down})), layers * rows * 64 * bytes) << recipe;
  }
}

// mxfp8_te makes the operand of wgrad from values, so these travel between ranks that share tokens, unless wgrad is left out.
TEST_F(OptimizerRules, SendCodesToAFrozenOutputProjection) {
  const auto sent = [&](const std::string& name, const Sets& more) {
    RunConfig run = config(name, with({"precision.dtype=bf16", "precision.recipe=mxfp8_te", "precision.fp8_output_proj=true",
                                       "model.hidden_size=64", "model.intermediate_size=64", "model.num_attention_heads=4",
                                       "model.pad_vocab_to=64", "parallel.tensor=2", "parallel.data=1", "parallel.sequence_parallel=true"},
                                      more))
                        .config;
    run.model.vocab_size = 8;
    return step_bytes(run, resolve_plan(run)).sent.activations;
  };
  const int64_t tokens = 2 * 4 * 16, half = tokens / 2, ranks = 2;  // each sends its half to the other
  EXPECT_EQ(sent("all", {}) - sent("frozen", {freeze({"output"})}), ranks * half * (2 * 64 - 64 - 64 / 32));
}

TEST_F(OptimizerRules, AreCountedBeforeTheRun) {
  const RunPreview all = preview_run(config("all", {})), frozen = preview_run(config("frozen", {freeze({"layers.*.mlp.*"})}));
  EXPECT_EQ(frozen.precision.parameters(), all.precision.parameters());
  EXPECT_EQ(all.precision.trained_parameters(), all.precision.parameters());
  const int64_t of_mlps = 2 * 3 * 32 * 48;
  EXPECT_EQ(frozen.precision.trained_parameters(), all.precision.parameters() - of_mlps);
  EXPECT_EQ(frozen.memory.gradients, all.memory.gradients - 4 * of_mlps);
  EXPECT_EQ(frozen.memory.optimizer, all.memory.optimizer - 8 * of_mlps);
  EXPECT_EQ(frozen.memory.masters, all.memory.masters);
}

}  // namespace mantissa::optimizer_rules_test
