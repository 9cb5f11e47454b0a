// Contents that a checkpoint must have before anything computes with its weights: a model of its tensors, finite weights, the codes that
// its manifest names.
#include <gmock/gmock.h>

#include <limits>

#include "base/hash.h"
#include "base/limits.h"
#include "checkpoint_shards.h"
#include "hf/export.h"
#include "hf/load_model.h"
#include "train/generate.h"
#include "training.h"

namespace mantissa::loaded_weights_test {

using nlohmann::json;
using test::error_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class LoadedWeights : public test::TrainingTest {
 protected:
  // Steps 1 and 2 of a run; the newest is the one to be spoiled.
  void train_in(const std::string& name, const std::string& recipe) const { run(name, sets(recipe, {"checkpoint.interval=1"})); }
  std::string newest(const std::string& name) const { return checkpoint(name, 2); }

  // 128 channels, so that blocks of 32 fit.
  static std::vector<std::string> sets(const std::string& recipe, std::vector<std::string> more = {}) {
    std::vector<std::string> out = {"precision.dtype=bf16", "precision.recipe=" + recipe, "model.hidden_size=128",
                                    "model.intermediate_size=128", "training.steps=2"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  // The plan of the manifest has other codes of weights.
  void change_quantized(const std::string& name, const std::function<void(json&)>& change) const {
    test::change_manifest(newest(name), [&](Manifest& manifest) {
      json plan = json::parse(manifest.plan);
      change(plan["quantized"]);
      manifest.plan = plan.dump();
    });
  }
  void change_codes(const std::string& name) const {
    change_quantized(name, [](json& quantized) { quantized["layers.1.attn.out.weight"]["codes_sum"] = "0000000000000000"; });
  }

  // Expects refusals from all ways to load it: eval and generate by the checkpoint and by its run folder, where step 1 is whole; a resume
  // of the run and one by path; a start from its weights.
  void expect_no_load(const std::string& name, const std::string& recipe, ExitCode code, const std::string& what) const {
    const std::string path = newest(name);
    const auto train = [&](const char* run_name, const std::string& from) {
      run(run_name, sets(recipe, {"training.steps=3", "checkpoint." + from}));
    };
    for (const Error& error :
         {error_of([&] { load_model(path, make_backend("cpu")); }), error_of([&] { load_model(run_folder(name), make_backend("cpu")); }),
          error_of([&] { train(name.c_str(), "resume=auto"); }), error_of([&] { train("other", "resume=" + path); }),
          error_of([&] { train("another", "init_from=" + path); })}) {
      EXPECT_EQ(error.code(), code) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(what));
    }
  }
};

// flashinfer's rule turns NaN into a number: the codes alone do not show it.
TEST_F(LoadedWeights, NanOrInfInAnyWeightEndsEveryLoadAndNamesTheFirstElement) {
  train_in("run", "mxfp4_qat");
  constexpr float kInf = std::numeric_limits<float>::infinity();
  struct Spoiled {
    const char* tensor;
    float value;
    const char* message;
  };
  for (const auto& [tensor, value, message] :
       std::vector<Spoiled>{{"final_norm.weight", -kInf, "final_norm.weight[5] = -inf"},
                            {"layers.1.mlp.down.weight", std::nanf(""), "layers.1.mlp.down.weight[0, 5] = nan"},
                            {"layers.0.attn.qkv.weight", kInf, "layers.0.attn.qkv.weight[0, 5] = inf"},
                            {"embed.weight", std::nanf(""), "embed.weight[0, 5] = nan"}}) {
    for (const int64_t element : {5, 7}) test::set_element(newest("run"), std::string("master.") + tensor, element, value);
    expect_no_load("run", "mxfp4_qat", ExitCode::numerical, newest("run") + ": " + message);
    for (const ExportWeights weights : {ExportWeights::dequantized, ExportWeights::packed}) {
      const Error error = error_of([&] { export_model(newest("run"), folder_ / "out", {.weights = weights}, make_backend("cpu")); });
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_THAT(error.what(), AllOf(HasSubstr(newest("run") + ": "), ContainsRegex("5\\] is (nan|-inf: not exported|NaN or Inf)")));
      EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
    }
  }
}

TEST_F(LoadedWeights, AMasterThatIsInfOnlyInBf16IsFoundWhetherOrNotItsRoundingIsKept) {
  for (const std::string gather : {"false", "true"}) {
    run(gather, sets("mxfp8", {"precision.fp8_param_gather=" + gather}));
    test::set_element(newest(gather), "master.layers.0.mlp.down.weight", 300, 3.4e38F);
    const Error error = error_of([&] { load_model(newest(gather), make_backend("cpu")); });
    EXPECT_EQ(error.code(), ExitCode::numerical);
    EXPECT_THAT(error.what(), HasSubstr("layers.0.mlp.down.weight[2, 44] = inf"));
  }
}

TEST_F(LoadedWeights, OtherCodesThanTheManifestsOrNoneEndEveryLoad) {
  for (const char* recipe : {"mxfp8", "mxfp4_qat"}) {
    train_in(recipe, recipe);
    change_codes(recipe);
    expect_no_load(recipe, recipe, ExitCode::data, "the codes of layers.1.attn.out.weight are not those");
  }
  train_in("less", "mxfp8");
  change_quantized("less", [](json& quantized) { quantized.erase("layers.0.mlp.down.weight"); });
  expect_no_load("less", "mxfp8", ExitCode::data, "layers.0.mlp.down.weight");
  run("from", sets("high"));
  EXPECT_NO_THROW(run("to", sets("mxfp8", {"checkpoint.init_from=" + newest("from")}))) << "it had no codes";
}

TEST_F(LoadedWeights, CodesAreComparedWhereTheWeightHasTheFormatsOfTheManifest) {
  const std::string allow = "checkpoint.allow_recipe_change=true";
  run("run", sets("mxfp8", {allow}));
  change_codes("run");
  const auto start = [&](const std::string& recipe, std::vector<std::string> more = {}) {
    more.push_back("checkpoint.init_from=" + newest("run"));
    run("from-" + recipe, sets(recipe, more));
  };
  EXPECT_NO_THROW(start("high"));
  EXPECT_NO_THROW(start("mxfp4_qat"));
  EXPECT_NO_THROW(start("rows", {R"(precision.recipes.rows={"base":"mxfp8","weight":{"format":"e4m3","block":[1,32]}})"}));
  EXPECT_EQ(error_of([&] { start("mxfp8_weights"); }).code(), ExitCode::data) << "the inputs differ, the weights do not";
  // To allow changes of the recipe excuses other codes on a resume only.
  EXPECT_NO_THROW(run("resume", sets("mxfp8", {allow, "training.steps=3", "checkpoint.resume=" + newest("run")})));
  const Error error = error_of([&] { start("mxfp8", {allow}); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("allow_recipe_change"))) << "it would not help";
  EXPECT_EQ(error_of([&] { load_model(newest("run"), make_backend("cpu")); }).code(), ExitCode::data);
}

// ---- the saved config

class SavedConfig : public LoadedWeights {
 protected:
  SavedConfig() { run("run", {"training.steps=2"}); }

  // Returns the error of load_model when a section of the saved config is changed so; it may not take memory for what the config asks for.
  Error error_with(const char* section, const json& change) const {
    const Manifest untouched = CheckpointReader(newest("run")).manifest();
    test::change_manifest(newest("run"), [&](Manifest& manifest) {
      json config = json::parse(manifest.config);
      config[section].merge_patch(change);
      manifest.config = config.dump();
    });
    const int64_t before = peak_resident_bytes();
    const Error error = error_of([&] { load_model(newest("run"), make_backend("cpu")); });
    EXPECT_LT(peak_resident_bytes() - before, 64 << 20) << change;
    test::change_manifest(newest("run"), [&](Manifest& manifest) { manifest = untouched; });
    return error;
  }
};

TEST_F(SavedConfig, ThatIsNotOfTheTensorsIsRefusedBeforeAnythingOfItsSizeIsMade) {
  struct Case {
    json change;
    const char* message;
  };
  const std::vector<Case> cases = {
      {{{"vocab_size", 2147483647}}, "embed.weight of its model is fp32 [2147483647, 32], but the tensor is fp32 [8, 32]"},
      {{{"hidden_size", 1 << 20}}, "embed.weight of its model is fp32 [8, 1048576]"},
      {{{"num_layers", 10000}}, "its model has layers.2.attn_norm.weight, but there is no tensor master.layers.2.attn_norm.weight"},
      {{{"num_layers", 1}}, "its model has 11 parameters, but there are 19"},
      {{{"head_dim", 65536}}, "layers.0.attn.qkv.weight of its model is fp32 [393216, 32]"},
      {{{"intermediate_size", 1 << 22}}, "layers.0.mlp.gate_up.weight of its model is fp32 [8388608, 32]"},
      {{{"position", "learned"}, {"max_position_embeddings", 1 << 24}}, "its model has position.weight"},
      {{{"mlp_bias", true}}, "its model has layers.0.mlp.gate_up.bias"},
      {{{"tie_word_embeddings", true}}, "its model has 18 parameters, but there are 19"},
      {{{"norm_bias", true}}, "RMSNorm has no bias"},
      {{{"num_attention_heads", 65536}, {"head_dim", 65536}, {"num_key_value_heads", 1}}, "is more than 4194304"}};
  for (const auto& [change, message] : cases) {
    const Error error = error_with("model", change);
    EXPECT_EQ(error.code(), ExitCode::data) << change;
    EXPECT_THAT(error.what(), HasSubstr(message));
    EXPECT_THAT(error.what(), HasSubstr("manifest.json (config): "));
  }
  const Error longer = error_with("training", {{"seq_len", 1 << 24}}), precision = error_with("precision", {{"recipe", "mxfp9"}});
  EXPECT_EQ(longer.code(), ExitCode::data);
  EXPECT_THAT(longer.what(), HasSubstr("training.seq_len: must be at most model.max_position_embeddings 16, got 16777216"));
  EXPECT_EQ(precision.code(), ExitCode::data);
  EXPECT_THAT(precision.what(), HasSubstr("manifest.json (config): precision.recipe: no recipe \"mxfp9\""));
}

// No tensor tells how many positions there are if they are rotary: tables and caches are made for the sequences in use.
TEST_F(SavedConfig, ThatAllowsLongSequencesTakesNoMemoryForThem) {
  test::change_manifest(newest("run"), [](Manifest& manifest) {
    json config = json::parse(manifest.config);
    config["model"]["max_position_embeddings"] = 1 << 24;
    manifest.config = config.dump();
  });
  const int64_t before = peak_resident_bytes();
  const LoadedModel loaded = load_model(newest("run"), make_backend("cpu"));
  const std::vector<int32_t> ids = generate(*loaded.model, {1, 2, 3}, {.max_new_tokens = 1200, .temperature = 0.0});
  EXPECT_EQ(ids.size(), 1200U);
  EXPECT_LT(loaded.device->allocator_stats().peak_in_use, 16 << 20);
  EXPECT_LT(peak_resident_bytes() - before, 64 << 20);
}

}  // namespace mantissa::loaded_weights_test
