// Models of Hugging Face's form in and out: every byte of what training never touched, and of what it did the values of forward.
#include "exports.h"
#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint_diff.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/hf/load_model.h"
#include "mantissa/train/load_config.h"

namespace mantissa::export_test {

using test::Exports;
using test::HfFolder;
using test::kShape;
using test::Trained;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Unchanged : public Exports, public ::testing::WithParamInterface<const char*> {};

TEST_P(Unchanged, EveryByteComesBack) {
  for (const char* types : {"F32", "BF16", "F32 BF16", "F16"}) {
    const std::string name = text(GetParam(), types);
    const HfFolder original(path(name), GetParam(), types);
    export_to(path(name), name + " out");
    const HfFolder back(path(name + " out"));
    ASSERT_EQ(back.names(), original.names());
    for (const std::string& tensor : original.names()) {
      if (std::string(types) == "F16") {
        EXPECT_TRUE(test::same_elements(back.values(tensor), original.values(tensor))) << tensor;
      } else {
        EXPECT_EQ(back.dtype(tensor), original.dtype(tensor)) << tensor;
        EXPECT_TRUE(test::same_elements(back.bytes(tensor), original.bytes(tensor))) << tensor;
      }
    }
    EXPECT_EQ(test::read_file(path(name + " out/tokenizer.json")), test::read_file(path(name + "/tokenizer.json")));
    EXPECT_STREQ(architecture_name(read_architecture_config(test::read_file(path(name + " out/config.json")), "").architecture),
                 GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(All, Unchanged, ::testing::ValuesIn(test::kArchitectureTypes),
                         [](const auto& one) { return std::string(one.param); });

TEST_F(Exports, ATensorMoreOrLessOrOfAnotherShapeIsDamageByName) {
  HfFolder folder(path("llama"), "llama", "F32");
  folder.without("model.layers.1.mlp.up_proj.weight").write(path("less"));
  EXPECT_EQ(folder_error("less").code(), ExitCode::data);
  EXPECT_THAT(folder_error("less").what(), HasSubstr("lacks tensors of its model:\n  model.layers.1.mlp.up_proj.weight"));
  folder.with("model.layers.0.self_attn.q_norm.weight", {32}).write(path("more"));
  EXPECT_EQ(folder_error("more").code(), ExitCode::data);
  EXPECT_THAT(folder_error("more").what(), HasSubstr("no place for:\n  model.layers.0.self_attn.q_norm.weight"));
  folder.with("model.norm.weight", {95}).write(path("other"));
  EXPECT_THAT(folder_error("other").what(), HasSubstr("model.norm.weight is [95], config.json makes it [96]"));
  for (const char* bad : {"less", "more", "other"}) {
    EXPECT_EQ(test::error_of([&] { export_to(path(bad), "refused"); }).code(), ExitCode::data) << bad;
    EXPECT_FALSE(std::filesystem::exists(path("refused"))) << bad;
  }
}

TEST_F(Exports, OfMillionsOfTensorsTheFirstThatAreMissingAreNamed) {
  for (const char* type : {"qwen3_moe", "gpt_oss", "gpt2"}) {
    const HfFolder folder(path(type), type, "F32");
    auto config = nlohmann::json::parse(test::read_file(path(text(type, "/config.json"))));
    const auto error_with = [&](const char* key, int64_t value) {
      config[key] = value;
      test::write_file(path(text(type, "/config.json")), config.dump());
      const Error error = folder_error(type);
      EXPECT_EQ(error.code(), ExitCode::data) << error.what();
      return std::string(error.what());
    };
    const bool gpt2 = type == std::string("gpt2");
    EXPECT_THAT(error_with(gpt2 ? "n_layer" : "num_hidden_layers", 10000),
                AllOf(HasSubstr(text("lacks tensors of its model:\n  ", gpt2 ? "transformer.h.2." : "model.layers.2.")),
                      HasSubstr("\n  and at least ")));
    if (gpt2) continue;
    EXPECT_THAT(error_with(config.contains("num_experts") ? "num_experts" : "num_local_experts", 65536),
                HasSubstr("is [3, 96], config.json makes it [65536, 96]"));
  }
}

TEST_F(Exports, AnUnknownFormIsToldBeforeTensorsAreMissed) {
  const HfFolder folder(path("packed"), "llama", "BF16", {{"quantization_config", {{"quant_method", "gptq"}, {"bits", 4}}}});
  folder.without("model.layers.0.mlp.up_proj.weight").write(path("packed"));
  EXPECT_EQ(folder_error("packed").code(), ExitCode::usage);
  EXPECT_THAT(folder_error("packed").what(), HasSubstr("config.json: quantization_config.quant_method \"gptq\": mantissa knows"));
}

// Without a word of config.json.
TEST_F(Exports, TheTypeOfTheTensorsIsThatOfTheModel) {
  const auto dtype = [&](const char* types, const nlohmann::json& change = {}) {
    const HfFolder folder(path(types), "llama", types, change);
    return HfWeights(path(types)).run_config().precision.dtype;
  };
  EXPECT_EQ(dtype("BF16"), Dtype::bf16);
  EXPECT_EQ(dtype("BF16 F32"), Dtype::f32);
  EXPECT_EQ(dtype("BF16 F16"), Dtype::f32);
  EXPECT_EQ(dtype("F16"), Dtype::f32);
  EXPECT_EQ(dtype("F32"), Dtype::f32);
  EXPECT_EQ(dtype("BF16", {{"torch_dtype", "float32"}}), Dtype::f32);
  EXPECT_EQ(dtype("F32", {{"dtype", "bfloat16"}}), Dtype::bf16);
}

// An export whose config.json says other mathematics, or another size, is of another model, whatever its values.
TEST_F(Exports, AFolderOfAnotherModelIsNotTheCheckpoints) {
  const auto differs = [&](const std::vector<std::string>& more, const nlohmann::json& change) {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(), more.begin(), more.end());
    const std::string name = text("run ", ++runs_);
    run(name, sets);
    export_to(checkpoint(name, 3), name + " out");
    const ModelConfig model = saved_config(CheckpointReader(checkpoint(name, 3))).model;
    EXPECT_THAT(export_model_differences(HfWeights(path(name + " out")), model), ::testing::IsEmpty()) << name;
    auto config = nlohmann::json::parse(test::read_file(path(name + " out/config.json")));
    config.update(change);
    ArchitectureConfig other = read_architecture_config(config.dump(), "config.json");
    return joined(forward_differences(model, other.model));
  };
  const std::string moe = R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96})";
  EXPECT_THAT(differs({}, {{"rope_theta", 500.0}}), HasSubstr("model.rope_theta: 10000 in the checkpoint, 500 here"));
  EXPECT_THAT(differs({"model.qk_norm=false", "model.attention_bias=qkv"}, {{"num_hidden_layers", 1}}), HasSubstr("model.num_layers"));
  EXPECT_THAT(
      differs({moe, "model.qk_norm=false", "model.num_attention_heads=2", "model.num_key_value_heads=2"}, {{"num_experts_per_tok", 1}}),
      HasSubstr("model.moe.num_experts_per_tok: 2"));
  EXPECT_THAT(differs({"model.sliding_window=8", "model.sliding_layers=[1]"}, {{"sliding_window", 7}}),
              HasSubstr("model.sliding_window: 0, 8 by layer in the checkpoint, 0, 7 here"));
  EXPECT_THAT(differs({R"(model.rope_scaling={"type": "llama3"})"}, {{"rms_norm_eps", 0.5}}), HasSubstr("model.norm_eps"));
}

TEST_F(Exports, TwoFoldersAreComparedTensorByTensor) {
  const HfFolder folder(path("a"), "qwen2", "F32 BF16");
  const std::string name = "model.layers.1.mlp.up_proj.weight", bias = "model.layers.0.self_attn.q_proj.bias";
  folder.flip(name, 4 * 7 + 2, 1).flip(name, 4 * 9, 1).without(bias).write(path("b"));
  SafetensorsFolder a{std::filesystem::path(path("a"))}, b{std::filesystem::path(path("b"))};
  const std::vector<TensorDifference> differences = diff_folders(a, b);
  ASSERT_EQ(differences.size(), 2U);
  EXPECT_EQ(differences[0].name + ": " + differences[0].what, bias + ": only in the first");
  EXPECT_EQ(differences[1].name, name);
  EXPECT_THAT(differences[1].what, HasSubstr("2 of 15360 elements, the first at "));
  EXPECT_THAT(diff_folders(a, a), ::testing::IsEmpty());
}

TEST_F(Exports, AnOutputBesideTiedEmbeddingsMustBeThese) {
  HfFolder folder(path("tied"), "qwen3", "BF16");
  folder.copy("model.embed_tokens.weight", "lm_head.weight").write(path("same"));
  EXPECT_NO_THROW(test::require_usable(path("same")));
  folder.with("lm_head.weight", {259, 96}).write(path("other"));
  EXPECT_EQ(folder_error("other").code(), ExitCode::data);
  EXPECT_THAT(folder_error("other").what(), HasSubstr("lm_head.weight differs from the embeddings"));
}

TEST_F(Exports, WhatIsNotFiniteIsNotLoaded) {
  HfFolder folder(path("nan"), "llama", "F32");
  folder.poison("model.layers.0.self_attn.k_proj.weight", 5).write(path("nan2"));
  EXPECT_EQ(folder_error("nan2").code(), ExitCode::data);
  EXPECT_THAT(folder_error("nan2").what(), HasSubstr(path("nan2") + ": model.layers.0.self_attn.k_proj.weight[0, 5] is NaN or Inf"));
  const Error error = test::error_of([&] { load_model(path("nan2"), make_backend("cpu")); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr(path("nan2") + ": model.layers.0.self_attn.k_proj.weight[0, 5] is NaN or Inf"));
}

TEST_F(Exports, AFolderThatIsThereIsRefused) {
  const HfFolder folder(path("llama"), "llama", "F32");
  std::filesystem::create_directory(path("there"));
  const Error error = test::error_of([&] { export_model(path("llama"), path("there"), {}, make_backend("cpu")); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("is there already"));
}

class ForwardValues : public Exports, public ::testing::WithParamInterface<Trained> {};

TEST_P(ForwardValues, AreWhatAnExportHolds) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), GetParam().sets.begin(), GetParam().sets.end());
  run("run", sets);
  const std::string saved = checkpoint("run", 3);
  export_to(saved, "out");
  EXPECT_EQ(difference("out", saved), std::nullopt);
  EXPECT_GT(verify_export(path("out")), 0);

  const LoadedModel trained = load_model(saved, make_backend("cpu")), exported = load_model(path("out"), make_backend("cpu"));
  for (Parameter& parameter : trained.model->parameters().all()) {
    const Parameter& other = *exported.model->parameters().find(parameter.name);
    const Tensor here = parameter.codes().defined() && !parameter.name.starts_with("output")
                            ? empty(*trained.device, Dtype::f32, parameter.codes().shape)
                            : Tensor();
    if (!here.defined()) continue;
    trained.device->run(Dequantize{.x = parameter.codes(), .out = here});
    const Tensor there = converted(other.value(), Dtype::f32);
    const auto rows = static_cast<size_t>(there.elements());
    const std::vector<float> a = to_host<float>(here), b = to_host<float>(there);
    ASSERT_GE(a.size(), rows);
    for (size_t i = 0; i < rows; ++i) ASSERT_EQ(a[i], b[i]) << parameter.name << " " << i;
  }

  HfFolder changed(path("out"));
  changed.flip("model.layers.1.mlp.down_proj.weight", 2 * 7, 0x40).write(path("out"));
  EXPECT_THAT(difference("out", saved).value_or(""), HasSubstr("model.layers.1.mlp.down_proj.weight[0, 7] is "));
  const Error error = test::error_of([&] { verify_export(path("out")); });
  EXPECT_EQ(error.code(), ExitCode::data);
  EXPECT_THAT(error.what(), HasSubstr("model.layers.1.mlp.down_proj.weight is not what was exported"));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, ForwardValues,
    ::testing::Values(
        Trained{"high", {"precision.dtype=bf16"}}, Trained{"mxfp8", {"precision.dtype=bf16", "precision.recipe=mxfp8"}},
        Trained{"weights", {"precision.dtype=bf16", "precision.recipe=mxfp8_weights"}},
        Trained{"qat", {"precision.dtype=bf16", "precision.recipe=mxfp4_qat"}},
        Trained{"qat_act", {"precision.dtype=bf16", "precision.recipe=mxfp4_qat_mxfp8_act", "model.tie_word_embeddings=true"}},
        Trained{"output", {"precision.dtype=bf16", "precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32"}},
        Trained{"mixed",
                {"precision.dtype=bf16", "precision.recipe=mxfp8", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"}},
        Trained{"blocks128",
                {"precision.dtype=bf16", "precision.recipe=fp8_block", "model.hidden_size=128", "model.intermediate_size=256",
                 "model.num_attention_heads=4", "model.num_key_value_heads=4"}}),
    [](const auto& one) { return std::string(one.param.name); });

TEST_F(Exports, WhatATypeCannotHoldIsRefusedByName) {
  run("fine", kShape);  // fp32
  const Error error =
      test::error_of([&] { export_model(checkpoint("fine", 3), path("coarse"), {.dtype = ExportDtype::bf16}, make_backend("cpu")); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("which bf16 does not hold exactly: take dtype auto or fp32"));
  EXPECT_FALSE(std::filesystem::exists(path("coarse")));
  export_to(checkpoint("fine", 3), "auto");
  EXPECT_EQ(HfFolder(path("auto")).dtype("model.norm.weight"), FileDtype::f32);
}

// A char tokenizer becomes one without merges; its ids are those of the characters.
TEST_F(Exports, ATokenizerOfCharactersIsWritten) {
  run("run", kShape);
  export_to(checkpoint("run", 3), "out");
  const auto tokenizer = nlohmann::json::parse(test::read_file(path("out/tokenizer.json")));
  EXPECT_EQ(tokenizer["model"]["vocab"], nlohmann::json({{"a", 0}, {"b", 1}, {"c", 2}, {"d", 3}, {"e", 4}, {"f", 5}, {"g", 6}, {"h", 7}}));
  EXPECT_EQ(tokenizer["model"]["merges"], nlohmann::json::array());
}

// A byte tokenizer's tokens are named as GPT-2's are.
TEST_F(Exports, ATokenizerOfBytesIsWritten) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), {"data.tokenizer=byte", "training.steps=1"});
  run("run", sets);
  export_to(checkpoint("run", 1), "out");
  const auto vocab = nlohmann::json::parse(test::read_file(path("out/tokenizer.json")))["model"]["vocab"];
  EXPECT_EQ(vocab.size(), 256U);
  const std::map<std::string, int> letters = {{"!", 33},       {"~", 126},      {"\u00a1", 161}, {"\u00ac", 172},
                                              {"\u00ae", 174}, {"\u00ff", 255}, {"\u0100", 0},   {"\u0120", 32},
                                              {"\u0121", 127}, {"\u0142", 160}, {"\u0143", 173}};
  for (const auto& [letter, byte] : letters) EXPECT_EQ(vocab.value(letter, -1), byte) << byte;
  EXPECT_EQ(nlohmann::json::parse(test::read_file(path("out/tokenizer_config.json")))["tokenizer_class"], "PreTrainedTokenizerFast");
}

// Also where vectors, or the values that codes stand for, are of another.
TEST_F(Exports, TheTypeOfAModelIsThatOfItsMatrices) {
  const auto type = [&](const std::string& folder) {
    return nlohmann::json::parse(test::read_file(path(folder + "/config.json")))["torch_dtype"].get<std::string>();
  };
  HfFolder(path("model"), "llama", "F32").without("model.norm.weight").with("model.norm.weight", {96}).write(path("model"));
  export_to(path("model"), "out");
  EXPECT_EQ(HfFolder(path("out")).dtype("model.norm.weight"), FileDtype::bf16);
  EXPECT_EQ(type("out"), "float32");
  std::vector<std::string> sets = kShape;
  sets.emplace_back("precision.recipe=mxfp8");
  run("run", sets);
  export_to(checkpoint("run", 3), "values");
  pack_to(checkpoint("run", 3), "packed");
  EXPECT_EQ(type("values"), "bfloat16");
  EXPECT_EQ(type("packed"), "bfloat16");
}

// When it is written, and when a run begins that will write some.
TEST_F(Exports, WhatOnlySomeProgramsReadIsALineInTheLog) {
  const auto logged = [&](const auto& body) {
    const std::string name = path(text("log ", ++runs_));
    open_log({.console = false, .file = name});
    body();
    close_log();
    return test::read_file(name);
  };
  const std::string moe = R"(model.moe={"num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": true, "intermediate_size": 32, )";
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), {moe + R"("dense_layers": [1], "capacity_factor": 2})", "training.steps=1"});
  const std::string dropping = "model.moe.capacity_factor: ", mixed = "model.moe.dense_layers: ", merges = "tokenizer.json: llama.cpp ";
  const std::string first = logged([&] { run("mixed", sets); });
  sets.emplace_back("checkpoint.export={}");
  const std::string beside = logged([&] { run("beside", sets); });
  const std::string here = logged([&] { export_to(checkpoint("mixed", 1), "out"); });
  for (const std::string& warning : {dropping, mixed, merges}) {
    EXPECT_THAT(first, Not(HasSubstr(warning)));
    EXPECT_THAT(beside, HasSubstr("checkpoint.export: " + warning));
    EXPECT_THAT(here, HasSubstr(warning));
  }
  sets = kShape;
  sets.insert(sets.end(), {"training.steps=1", "checkpoint.export={}", "precision.recipe=own",
                           R"(precision.recipes={"own": {"gemms": ["fprop"], "simulate": {"weight": {"format": "e3m2"}}}})"});
  EXPECT_THAT(logged([&] { run("rounded", sets); }), HasSubstr("checkpoint.export: forward rounds 8 weights, "));
  sets = kShape;
  sets.insert(sets.end(), {moe + R"("dense_layers": []})", "training.steps=1"});
  run("all", sets);
  EXPECT_THAT(logged([&] { export_to(path("out"), "again"); }), AllOf(HasSubstr(mixed), Not(HasSubstr(merges)), Not(HasSubstr(dropping))));
  EXPECT_THAT(logged([&] { export_to(checkpoint("all", 1), "all out"); }), AllOf(HasSubstr(merges), Not(HasSubstr(mixed))));
}

// A run that starts from a model has its mathematics, or says where not.
TEST_F(Exports, AModelThatDiffersIsRefusedByKey) {
  run("first", kShape);
  const auto started = [&](const std::vector<std::string>& more) {
    std::vector<std::string> sets = kShape;
    sets.push_back("checkpoint.init_from=" + checkpoint("first", 3));
    sets.push_back("training.steps=1");
    sets.insert(sets.end(), more.begin(), more.end());
    const std::string name = text("run ", ++runs_);
    run(name, sets);
    return saved_config(CheckpointReader(checkpoint(name, 1))).model;
  };
  const std::vector<std::string> refused = {"rope_theta=500",           "norm_eps=1e-3",        "activation=gelu_erf", "qk_norm=false",
                                            "tie_word_embeddings=true", "num_attention_heads=4"};
  for (const std::string& change : refused) {
    const Error error = test::error_of([&] { started({"model." + change}); });
    EXPECT_EQ(error.code(), ExitCode::usage) << change;
    EXPECT_THAT(error.what(), HasSubstr("is of another model:\n  model." + change.substr(0, change.find('=')))) << change;
  }
  EXPECT_EQ(started({"model.rope_theta=500", R"(checkpoint.allow_model_change=["model.rope_theta"])"}).rope_theta, 500);
  EXPECT_EQ(started({"model.init_std=0.5", "model.max_position_embeddings=32", "model.logits_dtype=fp32"}).max_position_embeddings, 32);
  const Error error = test::error_of([&] { started({R"(checkpoint.allow_model_change=["model.rope_teta"])"}); });
  EXPECT_THAT(error.what(), HasSubstr("\"model.rope_teta\" is no key of section model; did you mean 'model.rope_theta'?"));
}

TEST_F(Exports, WithoutASectionModelThatOfTheCheckpointIsTaken) {
  std::vector<std::string> padded = kShape;
  padded.push_back("model.pad_vocab_to=16");
  run("first", padded);
  const nlohmann::json json = {{"training", {{"steps", 1}, {"seq_len", 16}, {"micro_batch_size", 4}, {"grad_accum", 2}}},
                               {"data", {{"path", path("text.txt")}, {"tokenizer", "char"}}},
                               {"checkpoint", {{"init_from", "runs/first"}}},
                               {"logging", {{"run_name", "second"}, {"dir", path("runs/%n")}, {"tensorboard", false}}}};
  const LoadedConfig loaded = load_run_config({.file = path("second.json"), .text = json.dump(), .set_files = {}, .sets = {}});
  EXPECT_EQ(loaded.config.model.hidden_size, 64);
  EXPECT_EQ(loaded.config.model.num_attention_heads, 3);
  EXPECT_EQ(loaded.config.model.pad_vocab_to, 1) << "which is none of its values";
  EXPECT_EQ(loaded.report.origin("model.hidden_size"), "derived");
  EXPECT_EQ(run(loaded).losses.size(), 1U);
}

TEST_F(Exports, EndTokensAreThoseOfTheGenerationConfig) {
  HfFolder(path("llama"), "llama", "F32");
  EXPECT_THAT(load_model(path("llama"), make_backend("cpu")).end_tokens(), ::testing::IsEmpty());
  auto config = nlohmann::json::parse(test::read_file(path("llama/config.json")));
  config["eos_token_id"] = 7;
  test::write_file(path("llama/config.json"), config.dump());
  EXPECT_THAT(load_model(path("llama"), make_backend("cpu")).end_tokens(), ::testing::ElementsAre(7));
  test::write_file(path("llama/generation_config.json"), R"({"eos_token_id": []})");
  EXPECT_THAT(load_model(path("llama"), make_backend("cpu")).end_tokens(), ::testing::ElementsAre(7));
  test::write_file(path("llama/generation_config.json"), R"({"eos_token_id": [3, 258, 9999, -1]})");
  EXPECT_THAT(load_model(path("llama"), make_backend("cpu")).end_tokens(), ::testing::ElementsAre(3, 258));
}

// Masters start as the values of the file, whatever their type.
TEST_F(Exports, TrainingStartsFromWhatWasExported) {
  run("first", kShape);
  export_to(checkpoint("first", 3), "out");
  std::vector<std::string> sets = kShape;
  sets.push_back("training.steps=0");
  const auto started = [&](const std::string& name, const std::string& from) {
    std::vector<std::string> more = kShape;
    more.push_back("checkpoint.init_from=" + from);
    more.push_back("training.steps=1");
    return run(name, more).losses.at(0);
  };
  EXPECT_EQ(started("of folder", path("out")), started("of checkpoint", checkpoint("first", 3)));
  const Error error = test::error_of([&] {
    std::vector<std::string> more = kShape;
    more.push_back("checkpoint.resume=" + path("out"));
    run("resumed", more);
  });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("checkpoint.init_from"));
}

}  // namespace mantissa::export_test
