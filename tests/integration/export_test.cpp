// Files beside the weights of an export, and messages about an export. The weights are tested in export_round_trip_test.
#include "checkpoint/checkpoint_diff.h"
#include "checkpoint/saved_model.h"
#include "exports.h"
#include "mantissa/base/log.h"
#include "process.h"

namespace mantissa::export_test {

using nlohmann::json;
using test::Exports;
using test::HfFolder;
using test::kShape;
using test::read_file;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kExperts = R"("num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": true, "intermediate_size": 32)";

// config.json says nothing of the type. Vectors, and the values that codes stand for, do not count.
TEST_F(Exports, TheTypeOfTheMatricesIsThatOfTheModel) {
  const auto dtype = [&](const char* types, const json& change = {}) {
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

  HfFolder(path("model"), "llama", "F32").without("model.norm.weight").with("model.norm.weight", {96}).write(path("model"));
  export_to(path("model"), "out");
  EXPECT_EQ(HfFolder(path("out")).dtype("model.norm.weight"), FileDtype::bf16);
  const std::string saved = trained("run", {"precision.dtype=fp32", "precision.recipe=mxfp8"});
  export_to(saved, "values");
  pack_to(saved, "packed");
  EXPECT_EQ(json_in("out/config.json")["torch_dtype"], "float32");
  for (const char* name : {"values", "packed"}) EXPECT_EQ(json_in(text(name, "/config.json"))["torch_dtype"], "bfloat16") << name;
}

// An export whose config.json says other mathematics, or another size, is of another model, whatever its values.
TEST_F(Exports, AConfigOfAnotherModelIsNotTheCheckpoints) {
  const std::string moe = "model.moe={" + kExperts + "}";
  struct Differing {
    std::vector<std::string> sets;
    json change;
    const char* what;
  };
  const std::vector<Differing> all = {{{}, {{"rope_theta", 500.0}}, "model.rope_theta: 10000 in the checkpoint, 500 here"},
                                      {{"model.qk_norm=false", "model.attention_bias=qkv"}, {{"num_hidden_layers", 1}}, "model.num_layers"},
                                      {{moe, "model.qk_norm=false"}, {{"num_experts_per_tok", 2}}, "model.moe.num_experts_per_tok: 1"},
                                      {{"model.sliding_window=8", "model.sliding_layers=[1]"},
                                       {{"sliding_window", 7}},
                                       "model.sliding_window: 0, 8 by layer in the checkpoint, 0, 7 here"},
                                      {{R"(model.rope_scaling={"type": "llama3"})"}, {{"rms_norm_eps", 0.5}}, "model.norm_eps"}};
  for (const auto& [more, change, what] : all) {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(), more.begin(), more.end());
    ModelConfig model = config("run", sets).config.model;
    model.vocab_size = 8;
    const json written = json::parse(architecture_config(model, Dtype::f32, {}));
    const auto differences = [&](const json& read) {
      return joined(forward_differences(model, read_architecture_config(read.dump(), "config.json").model));
    };
    EXPECT_EQ(differences(written), "");
    EXPECT_THAT(differences(test::changed(written, change)), HasSubstr(what));
  }
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
  const Error error = test::error_of([&] { export_to(path("a"), "b"); });  // which is there
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("exists already"));
}

// A char tokenizer becomes one without merges; a byte tokenizer's tokens are named as GPT-2's are.
TEST_F(Exports, TokenizersOfCharactersAndBytesAreWritten) {
  export_to(trained("chars", {}), "chars");
  const json chars = json_in("chars/tokenizer.json")["model"];
  EXPECT_EQ(chars["vocab"], json::parse(R"({"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "g": 6, "h": 7})"));
  EXPECT_EQ(chars["merges"], json::array());
  export_to(trained("bytes", {"data.tokenizer=byte"}), "bytes");
  const json vocab = json_in("bytes/tokenizer.json")["model"]["vocab"];
  EXPECT_EQ(vocab.size(), 256U);
  const std::map<std::string, int> letters = {{"!", 33},       {"~", 126},      {"\u00a1", 161}, {"\u00ac", 172},
                                              {"\u00ae", 174}, {"\u00ff", 255}, {"\u0100", 0},   {"\u0120", 32},
                                              {"\u0121", 127}, {"\u0142", 160}, {"\u0143", 173}};
  for (const auto& [letter, byte] : letters) EXPECT_EQ(vocab.value(letter, -1), byte) << byte;
  EXPECT_EQ(json_in("bytes/tokenizer_config.json")["tokenizer_class"], "PreTrainedTokenizerFast");
}

// The line comes when it is written, and when a run begins that will write some.
TEST_F(Exports, WhatOnlySomeProgramsReadIsALineInTheLog) {
  const auto logged = [&](const auto& body) {
    const std::string name = path(text("log ", ++runs_));
    open_log({.console = false, .file = name});
    body();
    close_log();
    return read_file(name);
  };
  const std::string mixed_layers = "model.moe={" + kExperts + R"(, "dense_layers": [1], "capacity_factor": 2})";
  const std::string dropping = "model.moe.capacity_factor: ", mixed = "model.moe.dense_layers: ", merges = "tokenizer.json: llama.cpp ";
  const std::string first = logged([&] { trained("mixed", {mixed_layers}); });
  const std::string beside = logged([&] { trained("beside", {mixed_layers, "checkpoint.export={}"}); });
  const std::string here = logged([&] { export_to(checkpoint("mixed", 1), "out"); });
  for (const std::string& warning : {dropping, mixed, merges}) {
    EXPECT_THAT(first, Not(HasSubstr(warning)));
    EXPECT_THAT(beside, HasSubstr("checkpoint.export: " + warning));
    EXPECT_THAT(here, HasSubstr(warning));
  }
  const std::string again = logged([&] { export_to(path("out"), "again"); });
  EXPECT_THAT(again, ::testing::AllOf(HasSubstr(mixed), Not(HasSubstr(merges)), Not(HasSubstr(dropping))));
  trained("all", {"model.moe={" + kExperts + "}"});
  EXPECT_THAT(logged([&] { export_to(checkpoint("all", 1), "all out"); }), ::testing::AllOf(HasSubstr(merges), Not(HasSubstr(mixed))));
}

TEST_F(Exports, WeightsThatForwardSimulatesAreExportedAsTheyAreWithAWarning) {
  const auto simulated = [&](const std::string& name, const std::string& gemms) {
    return trained(name, {"precision.recipe=mine", "checkpoint.export={}",
                          R"(precision.recipes={"mine": {"simulate": {"weight": {"format": "e3m2"}}, "gemms": )" + gemms + "}}"});
  };
  const auto warnings = [&](const std::string& saved) { return ModelExport(saved, {}, make_backend("cpu")).warnings(); };
  const std::string rounded =
      "forward rounds 8 weights, the first of layers.0.attn.qkv, to e3m2 1x32 rceil (recipe mine); an export has them unrounded";
  open_log({.console = false, .file = path("log")});
  const std::string saved = simulated("simulated", R"(["fprop", "dgrad"])");
  close_log();
  EXPECT_THAT(read_file(path("log")), HasSubstr("checkpoint.export: " + rounded));
  EXPECT_THAT(warnings(saved), Contains(rounded));
  const test::ProcessResult written = test::run_mantissa({"export", run_folder("simulated"), "--output", "out"}, folder_.path());
  EXPECT_THAT(written.output, HasSubstr("read back and equal to the weights, which forward rounds\n"));
  const test::ProcessResult verified = test::run_mantissa({"verify", "out", "--against", run_folder("simulated")}, folder_.path());
  EXPECT_EQ(verified.exit_code, 0);
  EXPECT_THAT(verified.output, HasSubstr("from the weights in "));
  EXPECT_THAT(verified.errors, HasSubstr(rounded));
  EXPECT_THAT(warnings(simulated("exact", R"(["dgrad"])")), Not(Contains(HasSubstr("unrounded"))));
}

}  // namespace mantissa::export_test
