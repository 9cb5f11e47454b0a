// Training starts from a folder of Hugging Face's form: the values of its tensors, in whatever form they are kept.
#include "exports.h"
#include "mantissa/checkpoint/checkpoint_diff.h"
#include "mantissa/train/load_config.h"
#include "training_on_ranks.h"

namespace mantissa::start_from_folder_test {

using test::error_of;
using test::HfFolder;
using ::testing::HasSubstr;

class StartFromFolder : public test::ExportTest {
 protected:
  // Three steps of a run that takes its model from `from`, on letters instead of the ids that the model knows.
  LoadedConfig named(const std::string& name, const std::string& from, const nlohmann::json& more = {},
                     const std::vector<std::string>& sets = {}) const {
    nlohmann::json json = {{"training", {{"steps", 3}, {"seq_len", 16}, {"micro_batch_size", 2}, {"global_batch_size", 4}}},
                           {"data", {{"path", path("text.txt")}, {"tokenizer", "char"}}},
                           {"checkpoint", {{"init_from", path(from)}, {"allow_tokenizer_change", true}}},
                           {"logging", {{"run_name", name}, {"dir", path("runs/%n")}, {"tensorboard", false}}}};
    if (!more.is_null()) json.merge_patch(more);
    const int64_t world = json.value("/parallel/data"_json_pointer, 1) * json.value("/parallel/tensor"_json_pointer, 1);
    return load_run_config({.file = path(name + ".json"), .text = json.dump(), .set_files = {}, .sets = sets}, Inputs::must_exist, world);
  }
  void train(const LoadedConfig& config) const {
    const ParallelConfig& parallel = config.config.parallel;
    const auto errors = test::run_ranks(static_cast<int>(parallel.world()), [&](const Communicator& world) { run(config, {}, world); });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
  }
  // A folder with the same values in fp32.
  std::string in_fp32(const std::string& folder) const {
    const std::string wide = folder + " fp32";
    if (!std::filesystem::exists(path(wide))) HfFolder(path(folder)).in_fp32().write(path(wide));
    for (const char* const file : {"tokenizer.json", "generation_config.json"}) {
      std::error_code none;
      std::filesystem::copy_file(path(folder + "/" + file), path(wide + "/" + file), std::filesystem::copy_options::overwrite_existing,
                                 none);
    }
    return wide;
  }
  // Trains from a folder and from another with the same values: of all tensors that are saved, config.json alone may differ.
  void expect_same(const std::string& folder, const std::string& values, const nlohmann::json& more = {}) {
    const std::string direct = text("direct ", ++runs_), other = text("other ", runs_);
    train(named(direct, folder, more));
    train(named(other, values, more));
    CheckpointReader a(checkpoint(direct, 3)), b(checkpoint(other, 3));
    for (const TensorDifference& difference : diff_checkpoints(a, b)) {
      if (difference.name != std::string(kTokenizerFilePrefix) + "config.json")
        ADD_FAILURE() << folder << ' ' << difference.name << ": " << difference.what;
    }
    EXPECT_EQ(a.manifest().plan, b.manifest().plan) << folder;
  }
  Error refusal(const std::string& folder, const nlohmann::json& more = {}) {
    return error_of([&] { run(named(text("refused ", ++runs_), folder, more)); });
  }
};

class StartFromArchitecture : public StartFromFolder, public ::testing::WithParamInterface<const char*> {};

TEST_P(StartFromArchitecture, HasTheBitsOfItsValuesInFp32) {
  for (const char* types : {"F32", "BF16", "F16 F32"}) {
    const std::string name = text(GetParam(), ' ', types);
    HfFolder(path(name), GetParam(), types);
    expect_same(name, in_fp32(name));
  }
}

INSTANTIATE_TEST_SUITE_P(All, StartFromArchitecture, ::testing::ValuesIn(test::kArchitectureTypes),
                         [](const auto& one) { return std::string(one.param); });

// Codes of the file become masters, and the codes of the run's own recipe come from these.
TEST_F(StartFromFolder, PackedWeightsHaveTheBitsOfTheirValues) {
  for (const char* recipe : {"mxfp8", "mxfp4_qat"}) {
    std::vector<std::string> sets = test::kShape;
    sets.insert(sets.end(), {"precision.dtype=bf16", text("precision.recipe=", recipe)});
    run(recipe, sets);
    const std::string packed = text(recipe, " packed"), values = text(recipe, " values");
    pack_to(checkpoint(recipe, 3), packed);
    export_to(checkpoint(recipe, 3), values);
    for (const char* own : {"mxfp8", "mxfp4_qat", "high"})
      expect_same(packed, values, {{"precision", {{"dtype", "bf16"}, {"recipe", own}}}});
  }
}

// Each rank reads its own shards.
TEST_F(StartFromFolder, RanksHaveTheBitsOfTheValues) {
  HfFolder(path("dense"), "gpt2", "F16 F32");
  HfFolder(path("experts"), "mixtral", "BF16", {{"num_local_experts", 4}});
  HfFolder(path("fused"), "qwen3", "F32 BF16");
  for (const char* folder : {"dense", "fused", "experts"}) {
    expect_same(folder, in_fp32(folder), {{"parallel", {{"data", 2}}}});
    expect_same(folder, in_fp32(folder), {{"parallel", {{"tensor", 2}}}});
  }
  expect_same("experts", in_fp32("experts"), {{"parallel", {{"data", 2}, {"expert", 2}}}});
  std::vector<std::string> sets = test::kShape;
  sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.hidden_size=128", "model.intermediate_size=128",
                           "model.num_attention_heads=4", "model.num_key_value_heads=2"});
  run("trained", sets);
  pack_to(checkpoint("trained", 3), "codes");
  export_to(checkpoint("trained", 3), "values");
  for (const char* group : {"data", "tensor"})
    expect_same("codes", "values", {{"precision", {{"dtype", "bf16"}, {"recipe", "mxfp8"}}}, {"parallel", {{group, 2}}}});
}

TEST_F(StartFromFolder, TakesTheModelOfTheFolderAndKeepsItsFiles) {
  HfFolder(path("qwen"), "qwen3", "BF16");
  const LoadedConfig loaded = named("first", "qwen");
  EXPECT_EQ(loaded.config.model.hidden_size, 96);
  EXPECT_EQ(loaded.config.model.pad_vocab_to, 1) << "which a folder does not say";
  EXPECT_EQ(loaded.report.origin("model.hidden_size"), "derived");
  test::write_file(path("ids.bin"), std::string(4000, '\1'));
  const nlohmann::json ids = {{"data", {{"path", path("ids.bin")}, {"format", "nanogpt"}}}};
  run(named("on ids", "qwen", ids, {"data.tokenizer=null"}));
  CheckpointReader reader(checkpoint("on ids", 3));
  const std::vector<TokenizerFile> files = tokenizer_files(reader);
  ASSERT_EQ(files.size(), 2U) << "config.json and tokenizer.json";
  for (const TokenizerFile& file : files) EXPECT_EQ(file.bytes, test::read_file(path("qwen/" + file.name))) << file.name;
}

TEST_F(StartFromFolder, WhatCannotBeReadIsRefused) {
  const HfFolder good(path("good"), "qwen3", "F32");
  const std::string poisoned = "model.layers.1.self_attn.k_proj.weight";
  good.poison(poisoned, 3 * 96 + 5).write(path("poisoned"));
  EXPECT_EQ(refusal("poisoned").code(), ExitCode::data);
  EXPECT_THAT(refusal("poisoned").what(), HasSubstr(path("poisoned") + ": " + poisoned + "[3, 5] is NaN or Inf"));
  good.without("model.norm.weight").write(path("incomplete"));
  EXPECT_EQ(refusal("incomplete").code(), ExitCode::data) << "as with a section model";
  EXPECT_THAT(refusal("incomplete").what(), HasSubstr(path("incomplete")));
  EXPECT_THAT(refusal("incomplete").what(), HasSubstr("model.norm.weight"));
  good.write(path("no generation"));
  test::write_file(path("no generation/generation_config.json"), "{");
  EXPECT_EQ(refusal("no generation").code(), ExitCode::data);
  EXPECT_THAT(refusal("no generation").what(), HasSubstr("generation_config.json"));
}

TEST_F(StartFromFolder, AVocabularyThatATokenizerDoesNotFitIsSaidToBeThatOfTheFolder) {
  run("first", test::kShape);
  export_to(checkpoint("first", 3), "letters");
  const Error error = refusal("letters", {{"data", {{"tokenizer", "byte"}}}});
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("the byte tokenizer has 256 ids, got 8, which is that of the model of checkpoint.init_from"));
}

// One rank has the element; all name it.
TEST_F(StartFromFolder, RanksRefuseTogetherWhatOneOfThemFinds) {
  const HfFolder good(path("good"), "qwen3", "F32");
  good.poison("model.layers.1.mlp.up_proj.weight", 100 * 96 + 7).write(path("poisoned"));
  const LoadedConfig config = named("ranks", "poisoned", {{"parallel", {{"tensor", 2}}}});
  const auto errors = test::run_ranks(2, [&](const Communicator& world) { run(config, {}, world); });
  for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr("model.layers.1.mlp.up_proj.weight[100, 7] is NaN or Inf"));
}

// Ranks compare it, so that none reads another revision of a folder.
TEST_F(StartFromFolder, AFingerprintKnowsEveryTensor) {
  const HfFolder folder(path("one"), "qwen3", "BF16");
  const std::string before = HfWeights(path("one")).fingerprint();
  EXPECT_EQ(HfWeights(path("one")).fingerprint(), before);
  for (const std::string& name : folder.names()) {
    folder.flip(name, 3, 1).write(path("other"));
    EXPECT_NE(HfWeights(path("other")).fingerprint(), before) << name;
  }
}

TEST_F(StartFromFolder, ARunThatGoesOnNeedsItNoMore) {
  HfFolder(path("qwen"), "qwen3", "F32");
  const nlohmann::json model = nlohmann::json::parse(effective_config(named("own", "qwen").config)).at("model");
  const nlohmann::json more = {{"model", model}, {"checkpoint", {{"resume", "auto"}}}};
  EXPECT_EQ(run(named("again", "qwen", more)).losses.size(), 3U);
  std::filesystem::remove_all(path("qwen"));
  nlohmann::json longer = more;
  longer["training"]["steps"] = 5;
  EXPECT_EQ(run(named("again", "qwen", longer)).losses.size(), 2U);
}

// Any key of the model may be listed, also one that changes shapes.
TEST_F(StartFromFolder, AnotherShapeIsRefusedWhateverMayDiffer) {
  HfFolder(path("qwen"), "qwen3", "F32");
  const nlohmann::json model = nlohmann::json::parse(effective_config(named("own", "qwen").config)).at("model");
  for (const auto& [key, value] : std::vector<std::pair<std::string, int64_t>>{{"hidden_size", 64},
                                                                               {"hidden_size", 128},
                                                                               {"intermediate_size", 192},
                                                                               {"vocab_size", 300},
                                                                               {"num_layers", 3},
                                                                               {"head_dim", 16}}) {
    nlohmann::json other = model;
    other[key] = value;
    const Error error = refusal("qwen", {{"model", other}, {"checkpoint", {{"allow_model_change", {"model." + key}}}}});
    EXPECT_EQ(error.code(), ExitCode::usage) << key << ": " << error.what();
    EXPECT_THAT(error.what(), HasSubstr("the model needs")) << key;
  }
}

TEST_F(StartFromFolder, AnotherTokenizerOrModelIsRefusedByKey) {
  HfFolder(path("qwen"), "qwen3", "F32");
  const Error tokenizer = refusal("qwen", {{"checkpoint", {{"allow_tokenizer_change", false}}}});
  EXPECT_EQ(tokenizer.code(), ExitCode::usage);
  EXPECT_THAT(tokenizer.what(), HasSubstr("checkpoint.allow_tokenizer_change"));
  const nlohmann::json model = nlohmann::json::parse(effective_config(named("own", "qwen").config)).at("model");
  nlohmann::json other = model;
  other["rope_theta"] = 500;
  EXPECT_EQ(refusal("qwen", {{"model", other}}).code(), ExitCode::usage);
  EXPECT_THAT(refusal("qwen", {{"model", other}}).what(), HasSubstr("is of another model:\n  model.rope_theta"));
  EXPECT_EQ(run(named("same", "qwen", {{"model", model}})).losses.size(), 3U);
}

}  // namespace mantissa::start_from_folder_test
