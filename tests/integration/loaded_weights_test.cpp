// What a checkpoint must hold before anything computes with its weights: a model of its tensors, finite weights, the codes that its
// manifest names.
#include <gmock/gmock.h>

#include <cstring>
#include <limits>

#include "checkpoint_shards.h"
#include "mantissa/base/free_memory.h"
#include "mantissa/base/hash.h"
#include "mantissa/hf/export.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/train/generate.h"
#include "training.h"

namespace mantissa::loaded_weights_test {

using nlohmann::json;
using test::error_of;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

class LoadedWeights : public test::TrainingTest {
 protected:
  // Steps 2 and 4 of a run; the newest is the one to be spoiled.
  void train_in(const std::string& name, const std::string& recipe) const { run(name, sets(recipe, {"checkpoint.interval=2"})); }

  // 128 channels, so that blocks of 32 fit.
  static std::vector<std::string> sets(const std::string& recipe, std::vector<std::string> more = {}) {
    std::vector<std::string> out = {"precision.dtype=bf16", "precision.recipe=" + recipe, "model.hidden_size=128",
                                    "model.intermediate_size=128", "training.steps=4"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  void set_element(const std::string& name, const std::string& tensor, int64_t element, float value) const {
    test::set_element(checkpoint(name, 4), tensor, element, value);
  }

  void change_manifest(const std::string& name, const std::function<void(Manifest&)>& change) const {
    test::change_manifest(checkpoint(name, 4), change);
  }

  // The plan says other codes of a weight.
  void change_codes(const std::string& name, const std::string& weight) const {
    change_manifest(name, [&](Manifest& manifest) {
      json plan = json::parse(manifest.plan);
      plan["quantized"][weight]["codes_sum"] = "0000000000000000";
      manifest.plan = plan.dump();
    });
  }

  // The errors of all ways to load it: eval and generate by the checkpoint and by its run folder, where step 2 is whole; a resume of the
  // run and one by path; a start from its weights.
  std::vector<Error> errors_of_loading(const std::string& name, const std::string& recipe) const {
    const std::string path = checkpoint(name, 4);
    return {error_of([&] { load_model(path, make_backend("cpu")); }), error_of([&] { load_model(run_folder(name), make_backend("cpu")); }),
            error_of([&] {
              run(name, sets(recipe, {"training.steps=6", "checkpoint.resume=auto"}));
            }),
            error_of([&] {
              run("other", sets(recipe, {"training.steps=6", "checkpoint.resume=" + path}));
            }),
            error_of([&] { run("another", sets(recipe, {"checkpoint.init_from=" + path})); })};
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
  for (const Spoiled& spoiled : {Spoiled{"final_norm.weight", -kInf, "final_norm.weight[5] = -inf"},
                                 Spoiled{"layers.1.mlp.down.weight", std::nanf(""), "layers.1.mlp.down.weight[0, 5] = nan"},
                                 Spoiled{"layers.0.attn.qkv.weight", kInf, "layers.0.attn.qkv.weight[0, 5] = inf"},
                                 Spoiled{"embed.weight", std::nanf(""), "embed.weight[0, 5] = nan"}}) {
    set_element("run", std::string("master.") + spoiled.tensor, 5, spoiled.value);
    set_element("run", std::string("master.") + spoiled.tensor, 7, spoiled.value);
    for (const Error& error : errors_of_loading("run", "mxfp4_qat")) {
      EXPECT_EQ(error.code(), ExitCode::numerical) << error.what();
      EXPECT_THAT(error.what(), HasSubstr(checkpoint("run", 4) + ": " + spoiled.message));
    }
    for (const ExportWeights weights : {ExportWeights::dequantized, ExportWeights::packed}) {
      const Error error = error_of([&] { export_model(checkpoint("run", 4), folder_ / "out", {.weights = weights}, make_backend("cpu")); });
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr(checkpoint("run", 4) + ": "), ContainsRegex("5\\] is (nan|-inf: not exported|NaN or Inf)")));
      EXPECT_FALSE(std::filesystem::exists(folder_ / "out"));
    }
  }
}

TEST_F(LoadedWeights, AMasterThatIsInfOnlyInBf16IsFoundWhetherOrNotItsRoundingIsKept) {
  for (const char* gather : {"false", "true"}) {
    const std::string name = std::string("gather-") + gather;
    run(name, sets("mxfp8", {std::string("precision.fp8_param_gather=") + gather}));
    set_element(name, "master.layers.0.mlp.down.weight", 300, 3.4e38F);
    const Error error = error_of([&] { load_model(checkpoint(name, 4), make_backend("cpu")); });
    EXPECT_EQ(error.code(), ExitCode::numerical);
    EXPECT_THAT(error.what(), HasSubstr("layers.0.mlp.down.weight[2, 44] = inf"));
  }
}

TEST_F(LoadedWeights, OtherCodesThanTheManifestsEndEveryLoad) {
  for (const char* recipe : {"mxfp8", "mxfp4_qat"}) {
    train_in(recipe, recipe);
    change_codes(recipe, "layers.1.attn.out.weight");
    for (const Error& error : errors_of_loading(recipe, recipe)) {
      EXPECT_EQ(error.code(), ExitCode::data) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("the codes of layers.1.attn.out.weight are not those"));
    }
  }
}

TEST_F(LoadedWeights, AllowingRecipeChangesExcusesOtherCodesOnAResumeOnly) {
  const std::string allow = "checkpoint.allow_recipe_change=true";
  run("run", sets("mxfp8", {allow}));
  change_codes("run", "layers.1.attn.out.weight");
  for (const std::string& key : {std::string("init_from"), std::string("resume")}) {
    const auto start = [&] { run(key, sets("mxfp8", {allow, "training.steps=5", "checkpoint." + key + "=" + checkpoint("run", 4)})); };
    if (key == "resume") {
      EXPECT_NO_THROW(start());
    } else {
      const Error error = error_of(start);
      EXPECT_EQ(error.code(), ExitCode::data);
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("allow_recipe_change"))) << "it would not help";
    }
  }
  EXPECT_EQ(error_of([&] { load_model(checkpoint("run", 4), make_backend("cpu")); }).code(), ExitCode::data);
}

TEST_F(LoadedWeights, CodesAreComparedWhereTheWeightHasTheFormatsOfTheManifest) {
  train_in("run", "mxfp8");
  change_codes("run", "layers.1.attn.out.weight");
  const auto start = [&](const std::string& recipe, std::vector<std::string> more = {}) {
    more.push_back("checkpoint.init_from=" + checkpoint("run", 4));
    run("from-" + recipe, sets(recipe, more));
  };
  EXPECT_NO_THROW(start("high"));
  EXPECT_NO_THROW(start("mxfp4_qat"));
  EXPECT_NO_THROW(start("rows", {R"(precision.recipes.rows={"base":"mxfp8","weight":{"format":"e4m3","block":[1,32]}})"}));
  EXPECT_EQ(error_of([&] { start("mxfp8_weights"); }).code(), ExitCode::data) << "the inputs differ, the weights do not";
}

TEST_F(LoadedWeights, AWeightThatTheManifestShouldHaveCodesOfAndHasNotIsDamage) {
  train_in("run", "mxfp8");
  change_manifest("run", [](Manifest& manifest) {
    json plan = json::parse(manifest.plan);
    plan["quantized"].erase("layers.0.mlp.down.weight");
    manifest.plan = plan.dump();
  });
  for (const Error& error : errors_of_loading("run", "mxfp8")) {
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("layers.0.mlp.down.weight"));
  }
  run("from", sets("high"));
  EXPECT_NO_THROW(run("to", sets("mxfp8", {"checkpoint.init_from=" + checkpoint("from", 4)}))) << "it had no codes";
}

// ---- the saved config

class SavedConfig : public LoadedWeights {
 protected:
  SavedConfig() { run("run", {"training.steps=4"}); }

  // What load_model throws when a section of the saved config is changed so; it may not take memory for what the config asks for.
  Error error_with(const char* section, const json& change) const {
    const Manifest untouched = CheckpointReader(checkpoint("run", 4)).manifest();
    change_manifest("run", [&](Manifest& manifest) {
      json config = json::parse(manifest.config);
      config[section].merge_patch(change);
      manifest.config = config.dump();
    });
    const int64_t before = peak_resident_bytes();
    const Error error = error_of([&] { load_model(checkpoint("run", 4), make_backend("cpu")); });
    EXPECT_LT(peak_resident_bytes() - before, 64 << 20) << change;
    change_manifest("run", [&](Manifest& manifest) { manifest = untouched; });
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
}

TEST_F(SavedConfig, ThatHasLongerSequencesThanItsModelIsRefused) {
  const Error error = error_with("training", {{"seq_len", 1 << 24}});
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("training.seq_len: must be at most model.max_position_embeddings 16, got 16777216"));
}

TEST_F(SavedConfig, WhosePrecisionCannotBeIsRefused) {
  const Error error = error_with("precision", {{"recipe", "mxfp9"}});
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("manifest.json (config): precision.recipe: no recipe \"mxfp9\""));
}

// With rotary positions no tensor tells how many there are: tables and caches are made for the sequences in use.
TEST_F(SavedConfig, ThatAllowsLongSequencesTakesNoMemoryForThem) {
  change_manifest("run", [](Manifest& manifest) {
    json config = json::parse(manifest.config);
    config["model"]["max_position_embeddings"] = 1 << 24;
    manifest.config = config.dump();
  });
  const int64_t before = peak_resident_bytes();
  const LoadedModel loaded = load_model(checkpoint("run", 4), make_backend("cpu"));
  const std::vector<int32_t> ids = generate(*loaded.model, {1, 2, 3}, {.max_new_tokens = 1200, .temperature = 0.0});
  EXPECT_EQ(ids.size(), 1200U);
  EXPECT_LT(loaded.device->allocator_stats().peak_in_use, 16 << 20);
  EXPECT_LT(peak_resident_bytes() - before, 64 << 20);
}

}  // namespace mantissa::loaded_weights_test
