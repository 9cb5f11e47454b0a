// Recipes in whole runs: determinism, resuming, storage and the plan that a checkpoint keeps.
#include <gmock/gmock.h>

#include <map>

#include "checkpoint/checkpoint.h"
#include "checkpoint/precision_setup.h"
#include "checkpoint/saved_model.h"
#include "hf/load_model.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "models/model_shape.h"
#include "training.h"

namespace mantissa::recipes_test {

using test::error_of;
using test::TrainedRun;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Recipes : public test::TrainingTest, public ::testing::WithParamInterface<std::string> {
 protected:
  // 128 channels, so that 128-blocks fit.
  std::vector<std::string> sets(const std::string& recipe, std::vector<std::string> more = {}) const {
    std::vector<std::string> out = {"precision.dtype=bf16", "precision.recipe=" + recipe, "model.hidden_size=128",
                                    "model.intermediate_size=128", "training.steps=4"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  // Each run changes one thing that must not matter, or two.
  void expect_the_same_bits(const std::vector<std::string>& shape) const {
    const auto run_with = [&](const std::string& name, std::vector<std::string> more) {
      more.insert(more.end(), shape.begin(), shape.end());
      return run(name, sets(GetParam(), more));
    };
    const TrainedRun straight = run_with("straight", {"training.threads=1", "checkpoint.interval=2", "checkpoint.keep_every=1"});
    const std::string expected = state_of("straight", 4);
    for (const auto& [name, more] :
         {std::pair<std::string, std::vector<std::string>>{"selective", {"training.threads=2", "training.recompute=selective"}},
          {"full", {"training.threads=3", "training.recompute=full"}}}) {
      EXPECT_TRUE(test::same_elements(run_with(name, more).losses, straight.losses)) << name;
      EXPECT_TRUE(test::same_elements(state_of(name, 4), expected)) << name;
    }
    run_with("resumed", {"checkpoint.resume=" + checkpoint("straight", 2)});
    EXPECT_TRUE(test::same_elements(state_of("resumed", 4), expected));
  }
};

TEST_P(Recipes, GiveTheSameBitsForAnyThreadsRecomputationAndStop) { expect_the_same_bits({}); }

INSTANTIATE_TEST_SUITE_P(, Recipes, ::testing::ValuesIn(preset_names()), [](const auto& c) { return c.param; });

// Every width ends within a block: 2.25 and 3.1 of 32.
class RecipesAtOddWidths : public Recipes {
 protected:
  inline static const std::vector<std::string> kOdd = {"model.hidden_size=72", "model.intermediate_size=100"};
};

TEST_P(RecipesAtOddWidths, GiveTheSameBitsForAnyThreadsRecomputationAndStop) { expect_the_same_bits(kOdd); }

TEST_P(RecipesAtOddWidths, LearnAsHighPrecisionDoes) {
  const auto last = [&](const std::string& recipe) {
    std::vector<std::string> all = sets(recipe, kOdd);
    all.emplace_back("training.steps=20");
    return run(recipe, all).losses.back();
  };
  const double expected = last("bf16");
  EXPECT_NEAR(last(GetParam()), expected, 0.05 * expected);
}

INSTANTIATE_TEST_SUITE_P(, RecipesAtOddWidths,
                         ::testing::Values("mxfp8", "mxfp8_te", "mxfp8_weights", "fp8_block", "mxfp4_qat", "mxfp4_qat_mxfp8_act",
                                           "mxfp4_qat_mxfp4_act", "nvfp4_qat", "nvfp4_qat_nvfp4_act"),
                         [](const auto& c) { return c.param; });

class Plans : public Recipes {
 protected:
  // The log of what `body` does.
  template <class Body>
  std::string log_of(Body&& body) {
    open_log({.console = false, .file = folder_ / "log.txt"});
    body();
    close_log();
    return test::read_file(folder_ / "log.txt");
  }
};

// Codes alone, without bf16 values: 1.001 B a parameter in tiles, 1.031 in rows.
TEST_F(Plans, CodesThatAreTheParametersTrainLikeCopies) {
  const std::vector<std::string> rows = {R"(precision.recipes.rows={"base":"mxfp8","weight":{"format":"e4m3","block":[1,32]}})"};
  for (const std::string recipe : {"mxfp8", "mxfp8_weights", "rows"}) {
    run(recipe + "-copy", sets(recipe, rows));
    std::vector<std::string> primary = sets(recipe, rows);
    primary.emplace_back("precision.fp8_param_gather=true");
    run(recipe + "-primary", primary);
    EXPECT_TRUE(test::same_elements(state_of(recipe + "-primary", 4), state_of(recipe + "-copy", 4))) << recipe;
  }
}

TEST_F(Plans, EveryAllowedChangeOfAPlanIsALineInTheLog) {
  const std::string own = R"(precision.recipes={"own":{"base":"mxfp8","gemms":["fprop","dgrad"]}})";
  run("first", sets("mxfp8", {"model.pad_vocab_to=32", "precision.fp8_output_proj=true", "training.steps=2"}));
  const std::string rules = R"(precision.rules=[{"match":"layers.0.*","recipe":"own"}])";
  const std::vector<std::string> resumed = sets("mxfp8", {"model.pad_vocab_to=32", "checkpoint.resume=" + checkpoint("first", 2),
                                                          "training.steps=3", own, rules, "checkpoint.allow_recipe_change=true"});
  const std::string log = log_of([&] { EXPECT_EQ(run("second", resumed).steps.size(), 1U); });
  std::map<std::string, std::string> saved;
  const CheckpointReader second(checkpoint("second", 3));
  const SavedModel model = saved_model(second);
  for (const ModulePrecision& module : model.plan.modules()) saved[module.module.path] = module.recipe.name;
  EXPECT_EQ(saved["layers.0.mlp.down"], "own");
  EXPECT_EQ(saved["layers.1.mlp.down"], "mxfp8");
  EXPECT_EQ(saved["output"], "high");
  EXPECT_THAT(log, HasSubstr("changed since the checkpoint: the precision of layers.0.attn.qkv: mxfp8 -> own"));
  EXPECT_THAT(log, HasSubstr("changed since the checkpoint: the precision of layers.0.mlp.down: mxfp8 -> own"));
  EXPECT_THAT(log, HasSubstr("changed since the checkpoint: the precision of output: mxfp8 -> high"));
  EXPECT_THAT(log, Not(HasSubstr("the precision of layers.1")));
}

TEST_F(Plans, AMalformedPlanIsAnErrorOfTheData) {
  const PrecisionPlan plan = resolve_plan(this->config("plan", sets("mxfp8", {"model.vocab_size=8"})).config);
  EXPECT_TRUE(allowed_plan_changes(plan.to_json().dump(), plan, "m", LoadFor::resume).empty());
  for (const char* const bad : {"null", "{}", "[]", "5", R"({"modules":5})", R"({"modules":[7]})", R"({"modules":[{"module":1}]})",
                                R"({"modules":[{}]})", R"({"modules":[]})", R"({"modules":[{"module":"embed"}]})", "{"}) {
    const Error error = error_of([&] { allowed_plan_changes(bad, plan, "manifest.json", LoadFor::resume); });
    EXPECT_EQ(error.code(), ExitCode::data) << bad;
    EXPECT_THAT(error.what(), HasSubstr("manifest.json")) << bad;
  }
}

TEST_F(Plans, ARefusedResumeNamesAFewChangesAndWhatARecipeOfTheSameNameMeant) {
  const auto own = [](const char* block) { return text(R"(precision.recipes={"own":{"base":"mxfp8","weight":{"block":)", block, "}}}"); };
  run("first", sets("own", {own("[32,32]"), "training.steps=1"}));
  const auto message = [&](const std::string& recipe, std::vector<std::string> more) {
    more.insert(more.end(), {"checkpoint.resume=" + checkpoint("first", 1), "training.steps=2"});
    const Error error = error_of([&] { run("second", sets(recipe, more)); });
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    EXPECT_FALSE(std::filesystem::exists(run_folder("second") + "/run.json")) << "nothing was begun";
    return std::string(error.what());
  };
  EXPECT_THAT(message("high", {}), AllOf(HasSubstr("manifest.json: this run has other recipes than the checkpoint was trained with:\n"
                                                   "  layers.{0..1}.attn.qkv: own -> high\n  layers.{0..1}.attn.out: own -> high\n"),
                                         HasSubstr("set checkpoint.allow_recipe_change to true")));
  EXPECT_THAT(message("own", {own("[1,32]")}),
              AllOf(HasSubstr(R"(qkv: own (weight {"block":[32,32],"format":"e4m3","rule":"rceil"} -> {"block":[1,32],)"),
                    Not(HasSubstr("gemms"))));
  const std::string rules = R"(precision.rules=[{"match":"layers.0.attn.*","recipe":"high"},{"match":"layers.0.mlp.*","recipe":"bf16"},)"
                            R"({"match":"layers.1.*","recipe":"mxfp4_qat"}])";
  EXPECT_THAT(message("own", {own("[32,32]"), rules}),
              AllOf(HasSubstr("\n  layers.0.mlp.gate_up: own -> bf16\n"), HasSubstr("\n  and 4 more\n")));
}

TEST_F(Plans, TheCodesOfACheckpointFollowFromItsMastersInEveryRecipe) {
  const std::pair<std::vector<std::string>, size_t> cases[] = {
      {{"precision.recipe=mxfp8"}, 8},  // four linears in each of two layers
      {{"precision.recipe=fp8_block"}, 8},
      {{"precision.recipe=mxfp4_qat_mxfp8_act"}, 8},
      {{"precision.recipe=high"}, 0},
      {{"precision.fp8_param_gather=true", "model.pad_vocab_to=32", "precision.fp8_output_proj=true"}, 9},
      {{"precision.fp8_output_proj=true", "model.pad_vocab_to=32", "model.hidden_size=72", "model.intermediate_size=100"}, 9},
      {{"precision.recipe=mxfp4_qat", "model.hidden_size=72", "model.intermediate_size=100"}, 8},
      {{"precision.recipe=own", "model.hidden_size=72",
        R"(precision.recipes={"own": {"weight_fake_quant": {"format": "e2m1", "block": [1, 24]}}})"},
       8}};
  for (int number = 0; const auto& [more, weights] : cases) {
    const std::string name = text("run", number++);
    std::vector<std::string> all = sets("mxfp8", more);
    all.emplace_back("training.steps=1");
    run(name, all);
    CheckpointReader reader(checkpoint(name, 1));
    EXPECT_EQ(verify_codes(reader, *make_backend("cpu")), static_cast<int64_t>(weights)) << name;
    const nlohmann::json plan = nlohmann::json::parse(reader.manifest().plan);
    EXPECT_EQ(plan["quantized"].size(), weights) << name;
    const LoadedModel loaded = load_model(checkpoint(name, 1), make_backend("cpu"));
    const PrecisionPlan resolved = resolve_plan(loaded.config);
    const nlohmann::json again = nlohmann::json::parse(
        plan_manifest(resolved, codes_by_weight(loaded.model->parameters(), resolved, loaded.model->parameters().whole_shards())));
    EXPECT_EQ(again["quantized"], plan["quantized"]) << "codes are rebuilt from the masters";
    EXPECT_EQ(again["hash"], plan["hash"]);
  }
}

TEST_F(Plans, CodesThatDifferFromThoseOfTheCheckpointAreRefusedUnlessAllowed) {
  run("saved", sets("mxfp8", {"training.steps=2"}));
  const std::string path = checkpoint("saved", 2) + "/manifest.json";
  const Manifest untouched = CheckpointReader(checkpoint("saved", 2)).manifest();
  const auto resume = [&](const std::string& name, const nlohmann::json& change, std::vector<std::string> more = {}) {
    nlohmann::json plan = nlohmann::json::parse(untouched.plan);
    plan.merge_patch({{"quantized", change}});
    Manifest changed = untouched;
    changed.plan = plan.dump();
    test::write_file(path, format_manifest(changed));
    more.insert(more.end(), {"checkpoint.resume=" + checkpoint("saved", 2), "training.steps=3"});
    return run(name, sets("mxfp8", more)).losses.size();
  };
  const nlohmann::json other = {{"layers.1.mlp.down.weight", {{"codes_sum", "0000000000000000"}}}};
  EXPECT_EQ(resume("same", nlohmann::json::object()), 1U);
  for (const nlohmann::json& change : {other, nlohmann::json{{"layers.1.mlp.down.weight", nullptr}}, nlohmann::json(nullptr)}) {
    const Error error = error_of([&] { resume("refused", change); });
    EXPECT_EQ(error.code(), ExitCode::data) << change;
    EXPECT_THAT(error.what(), HasSubstr(change.is_null() ? "plan.quantized must be an object" : "layers.1.mlp.down.weight")) << change;
    CheckpointReader reader(checkpoint("saved", 2));
    EXPECT_EQ(error_of([&] { verify_codes(reader, *make_backend("cpu")); }).code(), ExitCode::data) << change;
  }
  const std::string log = log_of([&] { EXPECT_EQ(resume("allowed", other, {"checkpoint.allow_recipe_change=true"}), 1U); });
  EXPECT_THAT(log, HasSubstr("the codes of layers.1.mlp.down.weight are not those"));
}

TEST_F(Plans, TheOutputProjectionSwitchTakesTheSameCheckpoint) {
  const std::vector<std::string> base = sets("mxfp8", {"model.pad_vocab_to=32"});
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> out = base;
    out.insert(out.end(), more.begin(), more.end());
    return out;
  };
  const TrainedRun off = run("off", with({"checkpoint.interval=2"}));
  const TrainedRun on = run("on", with({"precision.fp8_output_proj=true", "checkpoint.resume=" + checkpoint("off", 2)}));
  ASSERT_EQ(on.losses.size(), 2U);
  EXPECT_NE(on.losses[0], off.losses[2]) << "the switch changes what is computed";
  EXPECT_NEAR(on.losses[0], off.losses[2], 0.05);
  const TrainedRun back = run("back", with({"checkpoint.resume=" + checkpoint("on", 4), "training.steps=5"}));
  EXPECT_EQ(back.losses.size(), 1U);
}

// Changes a configuration, or the recipe of its output projection, after it was checked.
TEST_F(Plans, WhatIsChangedAfterwardsIsRefusedByTheModelAndByThePlan) {
  RunConfig config = this->config("changed", sets("mxfp8", {"model.pad_vocab_to=32", "precision.fp8_output_proj=true"})).config;
  config.model.vocab_size = 8;
  const auto device = make_backend("cpu");
  const PrecisionPlan plan = resolve_plan(config);
  EXPECT_NO_THROW(Gpt(config.model, *device, plan, {}));
  const std::string key = "precision.fp8_output_proj: ";
  const std::pair<void (*)(ModelConfig&), const char*> models[] = {
      {[](ModelConfig& model) { model.logits_dtype = LogitsDtype::fp32; }, "excludes model.logits_dtype fp32"},
      {[](ModelConfig& model) { model.tie_word_embeddings = true; },
       "needs an output projection of its own: model.tie_word_embeddings must be false"},
  };
  for (const auto& [change, message] : models) {
    RunConfig changed = config;
    change(changed.model);
    const Error error = error_of([&] { Gpt(changed.model, *device, plan, {}); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(key + message));
    EXPECT_THAT(error_of([&] { resolve_plan(changed); }).what(), HasSubstr(key + message));
  }
  const std::pair<void (*)(Recipe&), const char*> recipes[] = {
      {[](Recipe& recipe) { recipe.weight = {}; }, "has weight none"},
      {[](Recipe& recipe) { recipe.input = {}; }, "input none"},
      {[](Recipe& recipe) { recipe.output_grad = {}; }, "output_grad none"},
      {[](Recipe& recipe) {
         recipe.weight = Quantization{Format::e4m3, 128, 128};
       },
       "has weight e4m3 128x128"},
      {[](Recipe& recipe) {
         recipe = Recipe{.name = "qat", .weight_fake_quant = {Format::e2m1, 1, 32, ScaleRule::flashinfer}};
       },
       "\"qat\" has"},
  };
  for (const auto& [change, message] : recipes) {
    std::vector<ModulePrecision> modules = plan.modules();
    change(modules.back().recipe);  // the recipe of output
    const Error error = error_of([&] { Gpt(config.model, *device, PrecisionPlan(plan.compute(), modules), {}); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr(key + "needs an ambient recipe that quantizes weight, input and output_grad"), HasSubstr(message)));
  }
  OutputProjectionConfig& on = config.precision.fp8_output_proj;
  on.fprop = on.dgrad = on.wgrad = false;
  EXPECT_THAT(error_of([&] { resolve_plan(config); }).what(), HasSubstr("fprop, dgrad and wgrad are all off"));
}

// A NaN weight becomes a number under flashinfer's rule: the step must see it all the same.
TEST_F(Plans, ANanWeightIsNotLaunderedByFakeQuantization) {
  RunConfig config = this->config("nan", sets("mxfp4_qat")).config;
  config.model.vocab_size = 8;
  const auto device = make_backend("cpu");
  Gpt model(config.model, *device, resolve_plan(config), {.recompute = Recompute::none, .gradients = true});
  Optimizer optimizer(model.parameters(), {});
  optimizer.initialize(1);
  EXPECT_EQ(to_host<int32_t>(model.parameters().nonfinite()), std::vector{0});
  for (size_t i = 0; i < model.parameters().all().size(); ++i) {
    if (model.parameters().all()[i].name == "layers.1.mlp.down.weight") test::set_value(optimizer.states()[i].master, 5, std::nan(""));
  }
  optimizer.store_masters();
  EXPECT_EQ(to_host<int32_t>(model.parameters().nonfinite()), std::vector{1});
  run("saved", sets("mxfp4_qat", {"training.steps=1"}));
  CheckpointReader reader(checkpoint("saved", 1));
  load_weights(reader, resolve_plan(config), LoadFor::use, model.parameters(), &optimizer);
  EXPECT_EQ(to_host<int32_t>(model.parameters().nonfinite()), std::vector{0}) << "of the weights before";
  optimizer.initialize(1);
  EXPECT_EQ(to_host<int32_t>(model.parameters().nonfinite()), std::vector{0});
}

}  // namespace mantissa::recipes_test
