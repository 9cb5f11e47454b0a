// Training starts from the weights of a folder of Hugging Face's form or of a checkpoint: the values of its tensors, in whatever form they
// are kept, and a model with the same mathematics.
#include "checkpoint/checkpoint_diff.h"
#include "checkpoint/saved_model.h"
#include "checkpoint_shards.h"
#include "exports.h"
#include "gguf_inputs.h"
#include "hf/gguf_reader.h"
#include "mantissa/base/log.h"
#include "mantissa/train/load_config.h"
#include "training_on_ranks.h"

namespace mantissa::start_from_folder_test {

using nlohmann::json;
using test::error_of;
using test::HfFolder;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class StartFromFolder : public test::ExportTest {
 protected:
  // A step of a run that takes its model from `from`, on letters instead of the ids that the model knows.
  LoadedConfig named(const std::string& name, const std::string& from, const json& more = {},
                     const std::vector<std::string>& sets = {}) const {
    json config = {{"training", {{"steps", 1}, {"seq_len", 16}, {"micro_batch_size", 2}, {"global_batch_size", 4}}},
                   {"data", {{"path", path("text.txt")}, {"tokenizer", "char"}}},
                   {"checkpoint", {{"init_from", path(from)}, {"allow_tokenizer_change", true}}},
                   {"logging", {{"run_name", name}, {"dir", path("runs/%n")}, {"tensorboard", false}}}};
    if (!more.is_null()) config.merge_patch(more);
    const int64_t world = config.value("/parallel/data"_json_pointer, 1) * config.value("/parallel/tensor"_json_pointer, 1);
    return load_run_config({.file = path(name + ".json"), .text = config.dump(), .set_files = {}, .sets = sets}, Inputs::must_exist, world);
  }
  json model_of(const std::string& folder) const { return json::parse(effective_config(named("own", folder).config)).at("model"); }
  void train(const LoadedConfig& config) const {
    const int64_t ranks = config.config.parallel.world();
    const auto errors = test::run_ranks(static_cast<int>(ranks), [&](const Communicator& world) { run(config, {}, world); });
    EXPECT_THAT(errors, ::testing::Each(::testing::IsEmpty()));
  }
  // Trains from a folder and from another with the same values: of all tensors that are saved, config.json alone may differ.
  void expect_same(const std::string& folder, const std::string& values, const json& more = {}) {
    const std::string direct = text("direct ", ++runs_), other = text("other ", runs_);
    train(named(direct, folder, more));
    train(named(other, values, more));
    CheckpointReader a(checkpoint(direct, 1)), b(checkpoint(other, 1));
    for (const TensorDifference& difference : diff_checkpoints(a, b)) {
      if (difference.name != std::string(kTokenizerFilePrefix) + "config.json")
        ADD_FAILURE() << folder << ' ' << difference.name << ": " << difference.what;
    }
    EXPECT_EQ(a.manifest().plan, b.manifest().plan) << folder;
  }
  void expect_bits_of_fp32(const std::string& folder, const std::vector<json>& runs = {json()}) {
    const std::string wide = folder + " fp32";
    HfFolder(path(folder)).in_fp32().write(path(wide));
    std::filesystem::copy_file(path(folder + "/tokenizer.json"), path(wide + "/tokenizer.json"));
    for (const json& more : runs) expect_same(folder, wide, more);
  }
  void expect_refused(const std::string& folder, const json& more, ExitCode code, const std::string& what) {
    const Error error = error_of([&] { run(named(text("refused ", ++runs_), folder, more)); });
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(what));
  }
};

// The model is taken from the folder whatever else in these sections is wrong, so nothing is missing in it.
TEST_F(StartFromFolder, AMistakeInAnotherKeyIsTheOnlyOne) {
  HfFolder(path("folder"), "qwen3", "F32");
  const std::vector<std::pair<json, std::string>> mistakes = {
      {{{"checkpoint", {{"export", {{"format", "gguf"}}}}}}, "checkpoint.export.format"},
      {{{"checkpoint", {{"interval", -1}}}}, "checkpoint.interval"},
      {{{"logging", {{"interval", 0}}}}, "logging.interval"}};
  for (const auto& [mistake, key] : mistakes) {
    json more = mistake;
    more["data"] = {{"path", path("text.txt")}, {"tokenizer", nullptr}};
    const Error error = error_of([&] { named("wrong", "folder", more); });
    EXPECT_THAT(error.what(), HasSubstr(key + ": "));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("model.vocab_size"))) << key;
  }
}

TEST_F(StartFromFolder, HasTheBitsOfItsValuesInFp32) {
  for (const char* architecture : test::kArchitectureTypes) {
    HfFolder(path(architecture), architecture, "F16 F32 BF16");
    expect_bits_of_fp32(architecture);
  }
  HfFolder(path("narrow"), "qwen2", "BF16");
  expect_bits_of_fp32("narrow");
}

// Codes of the file become masters, and the codes of the run's own recipe come from these.
TEST_F(StartFromFolder, PackedWeightsHaveTheBitsOfTheirValues) {
  for (const auto& [recipe, own] : std::vector<std::pair<std::string, std::string>>{
           {"mxfp8", "mxfp8"}, {"mxfp8", "high"}, {"mxfp4_qat", "mxfp4_qat"}, {"mxfp4_qat", "mxfp8"}}) {
    if (!std::filesystem::exists(path(recipe))) {
      const std::string saved = trained(recipe, {"precision.recipe=" + recipe});
      pack_to(saved, recipe);
      export_to(saved, recipe + " values");
    }
    expect_same(recipe, recipe + " values", {{"precision", {{"dtype", "bf16"}, {"recipe", own}}}});
  }
}

// Each rank reads its own shards.
TEST_F(StartFromFolder, RanksHaveTheBitsOfTheValues) {
  HfFolder(path("dense"), "gpt2", "F16 F32");
  HfFolder(path("experts"), "mixtral", "BF16", {{"num_local_experts", 4}});
  HfFolder(path("fused"), "qwen3", "F32 BF16");
  const json data = {{"parallel", {{"data", 2}}}}, tensor = {{"parallel", {{"tensor", 2}}}};
  expect_bits_of_fp32("dense", {data, tensor});
  expect_bits_of_fp32("fused", {tensor});
  expect_bits_of_fp32("experts", {tensor, {{"parallel", {{"data", 2}, {"expert", 2}}}}});
  const std::string saved = trained("trained", {"precision.recipe=mxfp8", "model.hidden_size=128", "model.intermediate_size=128",
                                                "model.num_attention_heads=4", "model.num_key_value_heads=2"});
  pack_to(saved, "codes");
  export_to(saved, "values");
  for (const char* group : {"data", "tensor"})
    expect_same("codes", "values", {{"precision", {{"dtype", "bf16"}, {"recipe", "mxfp8"}}}, {"parallel", {{group, 2}}}});
}

TEST_F(StartFromFolder, AGgufFileHasTheBitsOfItsFolder) {
  for (const std::string architecture : test::kArchitectureTypes) {
    HfFolder(path(architecture), architecture, "F32");
    test::ConvertedFolder(path(architecture)).write(path(architecture + ".gguf"));
    expect_same(architecture + ".gguf", architecture);
  }
  expect_same("llama.gguf", "llama", {{"parallel", {{"tensor", 2}}}});
  const auto four_bits = [](const std::string& name, const std::vector<int64_t>& shape) {
    return shape.size() > 1 && name.ends_with(".weight") && name.starts_with("blk.") ? GgmlType::mxfp4 : GgmlType::f32;
  };
  for (const std::string architecture : {"llama", "gpt_oss"}) {
    const test::ConvertedFolder codes(path(architecture), four_bits);
    codes.write(path(architecture + " codes.gguf"));
    codes.write_values(path(architecture + " values.gguf"));
    for (const char* recipe : {"mxfp4_qat", "high"})
      expect_same(architecture + " codes.gguf", architecture + " values.gguf", {{"precision", {{"dtype", "bf16"}, {"recipe", recipe}}}});
  }
}

// The tokenizer is the file's, also of a run that goes on, which needs the file no more.
TEST_F(StartFromFolder, TheTokenizerOfAGgufFileIsTakenAlong) {
  HfFolder(path("model"), "qwen3", "F32", {{"vocab_size", 264}});
  test::ConvertedFolder file(path("model"));
  const test::GgufWords words = test::GgufWords().with("qwen2");
  file.keys.insert(file.keys.end(), words.keys.begin(), words.keys.end());
  file.write(path("words.gguf"));
  const json own = {{"data", {{"tokenizer", nullptr}}}, {"checkpoint", {{"allow_tokenizer_change", false}}}};
  const LoadedConfig first = named("first", "words.gguf", own);
  EXPECT_EQ(first.config.data.tokenizer, path("words.gguf"));
  EXPECT_EQ(run(first).losses.size(), 1U);
  const std::optional<Tokenizer> saved = tokenizer_saved_at(checkpoint("first", 1));
  ASSERT_TRUE(saved.has_value());
  EXPECT_EQ(saved->encode("the"), tokenizer_at(path("words.gguf")).encode("the"));
  EXPECT_EQ(saved->encode("the").size(), 1U);
  json more = own;
  more.merge_patch({{"model", model_of("words.gguf")}, {"checkpoint", {{"resume", "auto"}}}, {"training", {{"steps", 2}}}});
  std::filesystem::remove(path("words.gguf"));
  more["data"]["tokenizer"] = path("words.gguf");
  more["checkpoint"]["init_from"] = nullptr;
  EXPECT_EQ(run(named("first", "words.gguf", more)).losses.size(), 1U);
  std::erase_if(file.keys, [](const std::string& key) { return key.starts_with(test::gguf_string("tokenizer.ggml.pre")); });
  file.write(path("unsplit.gguf"));
  EXPECT_THAT(error_of([&] { named("second", "unsplit.gguf", own); }).what(),
              AllOf(HasSubstr("data.tokenizer: the tokenizer of checkpoint.init_from cannot be used: "),
                    HasSubstr("tokenizer.ggml.pre\" is missing")));
}

TEST_F(StartFromFolder, TakesTheModelOfTheFolderAndKeepsItsFiles) {
  HfFolder(path("qwen"), "qwen3", "BF16");
  const LoadedConfig loaded = named("first", "qwen");
  EXPECT_EQ(loaded.config.model.hidden_size, 96);
  EXPECT_EQ(loaded.config.model.pad_vocab_to, 1) << "which a folder does not say";
  EXPECT_EQ(loaded.report.origin("model.hidden_size"), "derived");
  test::write_file(path("ids.bin"), std::string(4000, '\1'));
  run(named("on ids", "qwen", {{"data", {{"path", path("ids.bin")}, {"format", "nanogpt"}}}}, {"data.tokenizer=null"}));
  CheckpointReader reader(checkpoint("on ids", 1));
  const std::vector<TokenizerFile> files = tokenizer_files(reader);
  ASSERT_EQ(files.size(), 2U) << "config.json and tokenizer.json";
  for (const TokenizerFile& file : files) EXPECT_EQ(file.bytes, test::read_file(path("qwen/" + file.name))) << file.name;
  // A run that goes on needs the folder no more.
  json more = {{"model", model_of("qwen")}, {"checkpoint", {{"resume", "auto"}}}};
  EXPECT_EQ(run(named("again", "qwen", more)).losses.size(), 1U);
  std::filesystem::remove_all(path("qwen"));
  more["training"]["steps"] = 3;
  EXPECT_EQ(run(named("again", "qwen", more)).losses.size(), 2U);
}

TEST_F(StartFromFolder, WhatCannotBeReadIsRefused) {
  const HfFolder good(path("good"), "qwen3", "F32");
  good.poison("model.layers.1.self_attn.k_proj.weight", 3 * 96 + 5).write(path("poisoned"));
  expect_refused("poisoned", {}, ExitCode::data, path("poisoned") + ": model.layers.1.self_attn.k_proj.weight[3, 5] is NaN or Inf");
  good.without("model.norm.weight").write(path("incomplete"));
  expect_refused("incomplete", {}, ExitCode::data, path("incomplete"));
  good.write(path("no generation"));
  test::write_file(path("no generation/generation_config.json"), "{");
  expect_refused("no generation", {}, ExitCode::data, "generation_config.json");
  export_to(trained("first", {}), "letters");
  expect_refused("letters", {{"data", {{"tokenizer", "byte"}}}}, ExitCode::usage,
                 "the byte tokenizer has 256 ids, got 8 from the model in checkpoint.init_from");
  expect_refused("letters", {{"checkpoint", {{"init_from", nullptr}, {"resume", path("letters")}}}, {"model", model_of("letters")}},
                 ExitCode::usage, "checkpoint.init_from");
  // One rank has the element; all name it.
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

TEST_F(StartFromFolder, AnotherModelOrTokenizerIsRefusedByKey) {
  HfFolder(path("qwen"), "qwen3", "F32");
  expect_refused("qwen", {{"checkpoint", {{"allow_tokenizer_change", false}}}}, ExitCode::usage, "checkpoint.allow_tokenizer_change");
  const json model = model_of("qwen");
  expect_refused("qwen", {{"model", test::changed(model, {{"rope_theta", 500}})}}, ExitCode::usage,
                 "has another model:\n  model.rope_theta");
  EXPECT_EQ(run(named("same", "qwen", {{"model", model}})).losses.size(), 1U);
  // Any key of the model may be listed, also one that changes shapes.
  for (const auto& [key, value] : std::vector<std::pair<std::string, int64_t>>{{"hidden_size", 64},
                                                                               {"hidden_size", 128},
                                                                               {"intermediate_size", 192},
                                                                               {"vocab_size", 300},
                                                                               {"num_layers", 3},
                                                                               {"head_dim", 16}}) {
    const json other = test::changed(model, {{key, value}});
    expect_refused("qwen", {{"model", other}, {"checkpoint", {{"allow_model_change", {"model." + key}}}}}, ExitCode::usage,
                   "the model needs");
  }
}

// Published folders have a coefficient that nobody asks for: with it or without, training is the same.
TEST_F(StartFromFolder, TheLossOfRoutersIsAddedOnlyWhereTheFolderAsksForIt) {
  const json unasked = {{"router_aux_loss_coef", 0.9}, {"output_router_logits", false}},
             asked = {{"router_aux_loss_coef", 0.9}, {"output_router_logits", true}};
  const HfFolder folder(path("unasked"), "gpt_oss", "F32", unasked);
  HfFolder(path("none"), "gpt_oss", "F32", {{"router_aux_loss_coef", 0}});
  HfFolder(path("asked"), "gpt_oss", "F32", asked);
  expect_same("unasked", "none");
  const auto coefficient = [&](const std::string& from, const std::vector<std::string>& sets = {}) {
    return named("own", from, {}, sets).config.model.moe->aux_loss_coef;
  };
  EXPECT_EQ(coefficient("unasked"), 0.0);
  EXPECT_EQ(coefficient("asked"), 0.9) << "2 experts of a token, 2 layers";
  EXPECT_EQ(coefficient("asked", {"model.moe.aux_loss_coef=0"}), 0.0);
  open_log({.console = false, .file = path("log")});
  run(named("said", "asked", {}, {"model.moe.aux_loss_coef=0.5"}));
  close_log();
  const std::string said = test::read_file(path("log"));
  EXPECT_THAT(said, HasSubstr("asked/config.json: router_aux_loss_coef = 0.9 is model.moe.aux_loss_coef 0.9 in each layer"));
  EXPECT_THAT(said, HasSubstr("model.moe.aux_loss_coef: 0.9 in " + path("asked") + ", 0.5 here"));
}

// A key of the command line is one of the folder's model, and no section of its own, which would need all others.
TEST_F(StartFromFolder, KeysOfTheCommandLineAreOverThoseOfTheFoldersModel) {
  HfFolder(path("experts"), "mixtral", "F32", {{"num_local_experts", 4}});
  const auto with = [&](const std::vector<std::string>& sets, const json& more = {}) {
    return named(text("own ", ++runs_), "experts", more, sets);
  };
  const LoadedConfig loaded =
      with({"model.moe.aux_loss_coef=0.5", "model.init_std=0.5", "model.logits_dtype=fp32", "model.pad_vocab_to=8"});
  const ModelConfig& model = loaded.config.model;
  EXPECT_EQ(model.hidden_size, 96);
  EXPECT_EQ(model.moe->num_experts, 4);
  EXPECT_EQ(std::tuple(model.moe->aux_loss_coef, model.init_std, model.logits_dtype, model.pad_vocab_to),
            std::tuple(0.5, 0.5, LogitsDtype::fp32, 8));
  EXPECT_EQ(loaded.report.origin("model.moe.aux_loss_coef"), "--set model.moe.aux_loss_coef=0.5");
  for (const char* const key : {"model.hidden_size", "model.moe.num_experts", "model.rope_scaling"})
    EXPECT_EQ(loaded.report.origin(key), "derived") << key;
  EXPECT_EQ(run(loaded).losses.size(), 1U);
  // A key that changes the mathematics or the tensors is refused by its name, and may be allowed.
  for (const std::string change : {"rope_theta=500", "norm_eps=1e-3", "hidden_size=64", "num_layers=1", "moe.num_experts=2", "moe=null"}) {
    const std::string key = "model." + change.substr(0, change.find('='));
    const Error error = error_of([&] { run(with({"model." + change})); });
    EXPECT_EQ(error.code(), ExitCode::usage) << change;
    EXPECT_THAT(error.what(), AllOf(HasSubstr("has another model:\n"), HasSubstr("\n  " + key))) << change;
  }
  EXPECT_EQ(with({"model.rope_theta=500", R"(checkpoint.allow_model_change=["model.rope_theta"])"}).config.model.rope_theta, 500);
  EXPECT_THAT(error_of([&] { with({"model.rope_teta=500"}); }).what(), HasSubstr("did you mean"));
  // A section stands for itself, whoever gives it.
  const json section = {{"model", {{"vocab_size", 259}}}};
  for (const auto& [sets, more] : std::vector<std::pair<std::vector<std::string>, json>>{
           {{R"(model={"vocab_size": 259})"}, {}}, {{R"(model={})", "model.vocab_size=259"}, {}}, {{"model.norm_eps=1e-5"}, section}})
    EXPECT_THAT(error_of([&, &sets = sets, &more = more] { run(with(sets, more)); }).what(),
                HasSubstr("model.hidden_size: 96 in the checkpoint, 512 here"));
}

// A run that starts from a checkpoint has its mathematics, or says where not.
TEST_F(StartFromFolder, AnotherModelThanTheCheckpointsIsRefusedByKey) {
  const std::string first = trained("first", {"model.pad_vocab_to=16"});
  const auto started = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"model.pad_vocab_to=16", "checkpoint.init_from=" + first});
    return CheckpointReader(trained(text("run ", ++runs_), more)).config().model;
  };
  for (const std::string change :
       {"rope_theta=500", "norm_eps=1e-3", "activation=gelu_erf", "qk_norm=false", "tie_word_embeddings=true", "num_attention_heads=4"}) {
    const Error error = error_of([&] { started({"model." + change}); });
    EXPECT_EQ(error.code(), ExitCode::usage) << change;
    EXPECT_THAT(error.what(), HasSubstr("has another model:\n  model." + change.substr(0, change.find('='))));
  }
  EXPECT_EQ(started({"model.rope_theta=500", R"(checkpoint.allow_model_change=["model.rope_theta"])"}).rope_theta, 500);
  EXPECT_EQ(started({"model.init_std=0.5", "model.max_position_embeddings=32", "model.logits_dtype=fp32"}).max_position_embeddings, 32);
  EXPECT_THAT(error_of([&] { started({R"(checkpoint.allow_model_change=["model.rope_teta"])"}); }).what(),
              HasSubstr("\"model.rope_teta\" is not a key of section model; did you mean 'model.rope_theta'?"));
  // Without a section "model" that of the checkpoint is taken.
  const LoadedConfig loaded = named("second", "runs/first");
  EXPECT_EQ(loaded.config.model.num_attention_heads, 3);
  EXPECT_EQ(loaded.config.model.pad_vocab_to, 1) << "which is none of its values";
  EXPECT_EQ(loaded.report.origin("model.hidden_size"), "derived");
  EXPECT_EQ(run(loaded).losses.size(), 1U);
}

// A run that starts from packed weights has their values, in whatever form its plan keeps them, and says what changed.
TEST_F(StartFromFolder, PackedWeightsAreReconciledWithThePlan) {
  const std::vector<std::string> sets = {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32"};
  const std::string first = trained("first", sets);
  pack_to(first, "packed");
  export_to(first, "values");
  const HfWeights codes(path("packed"));
  const auto lines = [&](const std::string& recipe) { return reconciled_weights(codes, plan_of(recipe)); };
  EXPECT_THAT(lines("mxfp8"), Contains("layers.{0..1}.attn.qkv: e4m3 1x32 in the file, e4m3 32x32 here"));
  EXPECT_THAT(lines("high"), Contains("layers.{0..1}.mlp.down: e4m3 1x32 in the file, bf16 here"));
  EXPECT_THAT(lines("high"), Contains("output: e4m3 1x32 in the file, bf16 here"));
  EXPECT_THAT(lines("mxfp4_qat"), Contains("layers.{0..1}.mlp.down: e4m3 1x32 in the file, e2m1 1x32 here"));
  const PrecisionPlan plan = resolve_plan(codes.run_config());
  EXPECT_THAT(reconciled_weights(codes, plan), ::testing::IsEmpty());
  pack_to(trained("four", {"precision.recipe=mxfp4_qat"}), "four packed");
  EXPECT_THAT(reconciled_weights(HfWeights(path("four packed")), plan_of("mxfp4_qat")), ::testing::IsEmpty()) << "no file names a rule";
  const auto& gemms = plan.of("layers.1.mlp.down").recipe.gemms;
  EXPECT_TRUE(gemms.fprop && gemms.dgrad && !gemms.wgrad);  // GEMMs of a server and their input gradients
  // Masters are other, but forward reads the same values.
  const auto first_loss = [&](const std::string& name, const std::string& from) {
    std::vector<std::string> more = test::kShape;
    more.insert(more.end(), sets.begin(), sets.end());
    more.insert(more.end(), {"precision.dtype=bf16", "training.steps=1", "checkpoint.init_from=" + from});
    return run(name, more).losses.at(0);
  };
  const double loss = first_loss("from masters", first);
  EXPECT_EQ(first_loss("from codes", path("packed")), loss);
  EXPECT_EQ(first_loss("from values", path("values")), loss);
  const LoadedModel wide = load_model(path("packed"), make_backend("cpu"), {}, {.dtype = Dtype::f32});
  EXPECT_EQ(wide.model->compute(), Dtype::f32);
  for (const auto& [name, recipe] : wide.config.precision.recipes) EXPECT_EQ(recipe.compute, Dtype::f32) << name;
}

// The tensors of a run that started from a folder must be those of the model in its manifest.
TEST_F(StartFromFolder, ARunFromAFolderThatIsNotOfItsModelIsRefused) {
  pack_to(trained("run", {"precision.recipe=mxfp8"}), "packed");
  const std::string saved = trained("next", {"precision.recipe=mxfp8", "checkpoint.init_from=" + path("packed")});
  const Manifest written = CheckpointReader(saved).manifest();
  const auto expect_error = [&](const std::function<void(Manifest&)>& change, const std::string& what) {
    Manifest manifest = written;
    change(manifest);
    test::write_manifest_and_header(saved, manifest);
    const Error error = error_of([&] { load_model(saved, make_backend("cpu")); });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr(what));
  };
  const auto expect_error_renamed = [&](const std::string& from, const std::string& to, const std::string& what) {
    expect_error([&](Manifest& manifest) { std::ranges::find(manifest.tensors, from, &ManifestTensor::name)->name = to; }, what);
  };
  const std::string down = "layers.0.mlp.down.weight", file(kTokenizerFilePrefix);
  expect_error_renamed("master." + down, "others." + down, "there is no tensor master.layers.0.mlp.down.weight");
  expect_error_renamed("v." + down, "master.other", " parameters, but there are ");
  expect_error_renamed(file + "tokenizer.json", file + "other", "other must be a u8 vector, the bytes of a tokenizer or generation file");
  expect_error(
      [](Manifest& manifest) {
        json config = json::parse(manifest.config);
        config["model"].update({{"vocab_size", 7}, {"pad_vocab_to", 8}});
        manifest.config = config.dump();
      },
      "embed.weight of its model is fp32 [7, 64], but the tensor is fp32 [8, 64]");
}

}  // namespace mantissa::start_from_folder_test
