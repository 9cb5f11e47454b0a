// Codes and scales as servers read them, out and in.
#include "checkpoint_shards.h"
#include "exports.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/hf/load_model.h"
#include "process.h"

namespace mantissa::packed_export_test {

using test::Exports;
using test::HfFolder;
using test::kShape;
using test::logits_of;
using test::Trained;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Packed : public Exports, public ::testing::WithParamInterface<Trained> {};

// Codes and scales go out and in and out again with every byte; what they stand for is what a dequantized export holds.
TEST_P(Packed, CodesAreThoseOfForward) {
  std::vector<std::string> sets = kShape;
  sets.push_back("precision.dtype=bf16");
  sets.insert(sets.end(), GetParam().sets.begin(), GetParam().sets.end());
  run("run", sets);
  const std::string saved = checkpoint("run", 3);
  export_to(saved, "values");
  for (const Convention convention : {Convention::compressed_tensors, Convention::sglang, Convention::modelopt}) {
    const std::string name = choice_name(convention);
    if (convention != Convention::compressed_tensors &&
        !std::set<std::string>{"mxfp8", "te", "projection", "projection_some"}.contains(GetParam().name)) {
      const Error error = test::error_of([&] { pack_to(saved, name, convention); });
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_THAT(error.what(), HasSubstr("take the convention compressed-tensors"));
      EXPECT_FALSE(std::filesystem::exists(path(name)));
      continue;
    }
    pack_to(saved, name, convention);
    const bool head = std::string(GetParam().name).starts_with("projection");
    EXPECT_EQ(test::read_file(path(name + "/config.json")).find("\"lm_head\"") == std::string::npos,
              head);  // named, tied or not, unless quantized
    EXPECT_EQ(difference(name, saved), std::nullopt);
    EXPECT_THAT(HfWeights(path(name)).ignore_list_findings(), IsEmpty()) << name;
    pack_to(path(name), name + " again", convention);
    EXPECT_EQ(all_bytes(name), all_bytes(name + " again"));
    EXPECT_EQ(test::read_file(path(name + "/config.json")), test::read_file(path(name + " again/config.json")));
    export_to(path(name), name + " values");
    EXPECT_EQ(all_bytes("values"), all_bytes(name + " values"));
    EXPECT_EQ(logits_of(path(name)), logits_of(saved)) << name;
  }
  const std::string scales = "model.layers.1.mlp.down_proj.weight_scale";
  const HfFolder packed(path("compressed-tensors"));
  packed.flip(scales, 1, static_cast<char>(~packed.bytes(scales)[1])).write(path("nan"));  // a scale of 255 is NaN
  EXPECT_EQ(folder_error("nan").code(), ExitCode::data);
  EXPECT_EQ(test::error_of([&] { load_model(path("nan"), make_backend("cpu")); }).code(), ExitCode::data);
  EXPECT_THAT(test::error_of([&] { difference("nan", saved); }).what(), HasSubstr("model.layers.1.mlp.down_proj.weight[0, 32] is nan"));
  packed.flip(scales, 3 + 2, 1).write(path("compressed-tensors"));
  EXPECT_THAT(difference("compressed-tensors", saved).value_or(""), HasSubstr("model.layers.1.mlp.down_proj.weight[1, 64] is "));
}

INSTANTIATE_TEST_SUITE_P(
    Recipes, Packed,
    ::testing::Values(Trained{"mxfp8", {"precision.recipe=mxfp8"}}, Trained{"te", {"precision.recipe=mxfp8_te"}},
                      Trained{"weights", {"precision.recipe=mxfp8_weights"}},
                      Trained{"qat", {"precision.recipe=mxfp4_qat", "model.tie_word_embeddings=true"}},
                      Trained{"qat_act", {"precision.recipe=mxfp4_qat_mxfp8_act"}},
                      Trained{"mixed", {"precision.recipe=mxfp8", R"(precision.rules=[{"match": "layers.0.*", "recipe": "mxfp4_qat"}])"}},
                      Trained{"projection", {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32"}},
                      Trained{"projection_some",
                              {"precision.recipe=mxfp8", "precision.fp8_output_proj=true", "model.pad_vocab_to=32",
                               R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])"}},
                      Trained{"some", {"precision.recipe=mxfp8_weights", R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])"}},
                      Trained{"experts",
                              {"precision.recipe=mxfp8",
                               R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96, "dense_layers": [1]})",
                               R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat_mxfp8_act"}])"}}),
    [](const auto& one) { return std::string(one.param.name); });

// The experts of gpt-oss are blocks in two tensors, whose rows are gate and up in turn.
TEST_F(Exports, ExpertsOfGptOssArePackedInItsOwnBlocks) {
  std::vector<std::string> sets = kShape;
  for (const char* const set :
       {"precision.dtype=bf16", "model.qk_norm=false", "model.attention_bias=all", "model.attention_sinks=true",
        "model.activation=swiglu_clamped",
        R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96, "router_bias": true, "expert_mlp_bias": true})",
        R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}])"})
    sets.push_back(set);
  run("run", sets);
  const std::string saved = checkpoint("run", 3), blocks = "model.layers.1.mlp.experts.gate_up_proj_blocks";
  export_to(saved, "values");
  pack_to(saved, "packed");
  EXPECT_EQ(difference("values", saved), std::nullopt);
  EXPECT_EQ(difference("packed", saved), std::nullopt);
  const HfWeights codes(path("packed"));
  EXPECT_THAT(reconciled_weights(codes, resolve_plan(codes.run_config())), ::testing::IsEmpty());
  EXPECT_THAT(reconciled_weights(codes, test::high_plan(codes.config().model, Dtype::bf16)),
              ::testing::Contains("layers.{0..1}.moe.experts.down: e2m1 1x32 in the file, bf16 here"));
  pack_to(path("packed"), "again");
  EXPECT_EQ(all_bytes("packed"), all_bytes("again"));
  export_to(path("packed"), "in values");
  EXPECT_EQ(all_bytes("values"), all_bytes("in values"));
  for (const std::string& packed : {path("packed"), path("values")}) EXPECT_EQ(logits_of(packed), logits_of(saved)) << packed;
  // Row 5 of expert 2 is up's third: values 2 and 3 of its second block, of 16 bytes.
  HfFolder(path("packed")).flip(blocks, ((2 * 192 + 5) * 2 + 1) * 16 + 1, 0x11).write(path("packed"));
  EXPECT_THAT(difference("packed", saved).value_or(""), HasSubstr("model.layers.1.mlp.experts.gate_up_proj[2, 34, 5] is "));
  const Error own = test::error_of([&] { pack_to(saved, "refused", Convention::sglang); });
  EXPECT_EQ(own.code(), ExitCode::usage);
  EXPECT_THAT(own.what(), HasSubstr("convention sglang: gpt-oss has a form of its own, blocks and scales: drop the convention"));
  EXPECT_FALSE(std::filesystem::exists(path("refused")));
  sets.back() = R"(precision.rules=[{"match": "layers.1.moe.experts.*", "recipe": "mxfp4_qat"}])";
  run("half", sets);
  EXPECT_THAT(test::error_of([&] { pack_to(checkpoint("half", 3), "refused"); }).what(),
              HasSubstr("gpt-oss has MXFP4 in all layers or none"));
  const std::vector<std::string> others = {"precision.recipe=mxfp8", "precision.recipe=mxfp4_qat",
                                           R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat_mxfp8_act"}])"};
  for (const std::string& other : others) {
    sets.back() = other;
    const std::string name = text("other ", ++runs_);
    run(name, sets);
    EXPECT_THAT(test::error_of([&] { pack_to(checkpoint(name, 3), "refused"); }).what(), HasSubstr("of gpt-oss only experts are packed"));
  }
}

// A run that starts from packed weights has their values, in whatever form its plan keeps them, and says what changed.
TEST_F(Exports, PackedWeightsAreReconciledWithThePlan) {
  std::vector<std::string> sets = kShape;
  sets.push_back("precision.dtype=bf16");
  sets.push_back("precision.recipe=mxfp8");
  sets.push_back("precision.fp8_output_proj=true");
  sets.push_back("model.pad_vocab_to=32");
  run("first", sets);
  pack_to(checkpoint("first", 3), "packed");
  const HfWeights codes(path("packed"));
  const auto lines = [&](const std::string& recipe) {
    std::vector<std::string> other = kShape;
    other.push_back("precision.dtype=bf16");
    other.push_back("precision.recipe=" + recipe);
    RunConfig config = config_named(recipe, other);
    return reconciled_weights(codes, resolve_plan(config));
  };
  EXPECT_THAT(lines("mxfp8"), ::testing::Contains("layers.{0..1}.attn.qkv: e4m3 1x32 in the file, e4m3 32x32 here"));
  EXPECT_THAT(lines("high"), ::testing::Contains("layers.{0..1}.mlp.down: e4m3 1x32 in the file, bf16 here"));
  EXPECT_THAT(lines("high"), ::testing::Contains("output: e4m3 1x32 in the file, bf16 here"));
  EXPECT_THAT(lines("mxfp4_qat"), ::testing::Contains("layers.{0..1}.mlp.down: e4m3 1x32 in the file, e2m1 1x32 here"));
  EXPECT_THAT(reconciled_weights(codes, resolve_plan(codes.run_config())), ::testing::IsEmpty());
  sets.push_back("training.steps=1");
  const auto first_loss = [&](const std::string& name, const std::string& from) {
    std::vector<std::string> more = sets;
    more.push_back("checkpoint.init_from=" + from);
    return run(name, more).losses.at(0);
  };
  // Masters are other, but forward reads the same values.
  EXPECT_EQ(first_loss("from codes", path("packed")), first_loss("from masters", checkpoint("first", 3)));
}

// The tensors of a run that started from a folder must be those of the model in its manifest.
TEST_F(Exports, ARunFromAFolderThatIsNotOfItsModelIsRefused) {
  std::vector<std::string> sets = kShape;
  sets.push_back("precision.dtype=bf16");
  sets.push_back("precision.recipe=mxfp8");
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed");
  sets.push_back("checkpoint.init_from=" + path("packed"));
  run("next", sets);
  const std::string saved = checkpoint("next", 3);
  const Manifest written = CheckpointReader(saved).manifest();
  const auto error_with = [&](const std::function<void(Manifest&)>& change) {
    Manifest manifest = written;
    change(manifest);
    test::write_manifest_and_header(saved, manifest);
    const Error error = test::error_of([&] { load_model(saved, make_backend("cpu")); });
    EXPECT_EQ(error.code(), ExitCode::data);
    return std::string(error.what());
  };
  const auto renamed = [](Manifest& manifest, const std::string& from, const std::string& to) {
    std::ranges::find(manifest.tensors, from, &ManifestTensor::name)->name = to;
  };
  const std::string down = "layers.0.mlp.down.weight";
  EXPECT_THAT(error_with([&](Manifest& m) { renamed(m, "master." + down, "others." + down); }),
              HasSubstr("there is no tensor master.layers.0.mlp.down.weight"));
  EXPECT_THAT(error_with([&](Manifest& m) { renamed(m, "v." + down, "master.other"); }), HasSubstr(" parameters, but there are "));
  EXPECT_THAT(error_with([](Manifest& m) {
                auto config = nlohmann::json::parse(m.config);
                config["model"].update({{"vocab_size", 7}, {"pad_vocab_to", 8}});
                m.config = config.dump();
              }),
              HasSubstr("embed.weight of its model is fp32 [7, 64], but the tensor is fp32 [8, 64]"));
  EXPECT_THAT(error_with([&](Manifest& m) {
                renamed(m, std::string(kTokenizerFilePrefix) + "tokenizer.json", std::string(kTokenizerFilePrefix) + "other");
              }),
              HasSubstr("other must be the bytes of a file that goes with a model"));
  const LoadedModel wide = load_model(path("packed"), make_backend("cpu"), {}, Dtype::f32);
  EXPECT_EQ(wide.model->compute(), Dtype::f32);
  for (const auto& [name, recipe] : wide.config.precision.recipes) EXPECT_EQ(recipe.compute, Dtype::f32) << name;
}

TEST_F(Exports, ScalesAndCodesThatAreNoNumbersAreRefused) {
  std::vector<std::string> sets = kShape;
  sets.push_back("precision.dtype=bf16");
  sets.push_back("precision.recipe=mxfp8");
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed");
  const HfFolder packed(path("packed"));
  const auto error_with = [&](const std::string& name, size_t byte, int value) {
    packed.flip(name, byte, static_cast<char>(packed.bytes(name)[byte] ^ value)).write(path("bad"));
    const Error error = folder_error("bad");
    EXPECT_EQ(error.code(), ExitCode::data);
    return std::string(error.what());
  };
  const std::string weight = "model.layers.1.mlp.down_proj.weight";  // 96 columns
  EXPECT_THAT(error_with(weight + "_scale", 5 * 3 + 1, 0xFF), HasSubstr(weight + "[5, 32] is NaN or Inf"));
  EXPECT_THAT(error_with(weight + "_scale", 5 * 3 + 1, 254), ::testing::AllOf(HasSubstr(weight + "[5, "), HasSubstr(" is NaN or Inf")));
  for (const int nan : {0x7F, 0xFF}) EXPECT_THAT(error_with(weight, 5 * 96 + 40, nan), HasSubstr(weight + "[5, 40] is NaN or Inf"));
}

// Servers fuse q, k and v, gate and up, and all experts of a layer.
TEST_F(Exports, QuantizationConfigMustSayOneThingOfOneWeightAndWhatItIs) {
  std::vector<std::string> sets = kShape;
  sets.push_back("precision.dtype=bf16");
  sets.push_back("precision.recipe=mxfp8");
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed");
  const nlohmann::json written = nlohmann::json::parse(test::read_file(path("packed/config.json")));
  const auto error_with = [&](const std::string& target, const nlohmann::json& change, const std::vector<std::string>& ignore) {
    nlohmann::json config = written;
    nlohmann::json& quantization = config["quantization_config"];
    nlohmann::json group = quantization["config_groups"]["group_0"];
    group["targets"] = {target};
    group.merge_patch(change);
    if (!target.empty()) quantization["config_groups"]["group_1"] = group;
    for (const std::string& name : ignore) quantization["ignore"].push_back(name);
    test::write_file(path("packed/config.json"), config.dump());
    const Error error = folder_error("packed");
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_EQ(test::error_of([&] { export_to(path("packed"), "refused"); }).what(), std::string(error.what()));
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
    return std::string(error.what());
  };
  const std::string k = "model.layers.1.self_attn.k_proj", up = "model.layers.0.mlp.up_proj";
  EXPECT_THAT(
      error_with(k, {{"input_activations", nullptr}}, {}),
      ::testing::AllOf(HasSubstr("model.layers.1.self_attn.q_proj is e4m3 with quantized inputs"),
                       HasSubstr(k + " is e4m3 with inputs in high precision"), HasSubstr("both are parts of layers.1.attn.qkv.weight")));
  EXPECT_THAT(error_with("", {}, {"re:.*up_proj"}), HasSubstr(up + " is not quantized, but both are parts of layers.0.mlp.gate_up.weight"));
  EXPECT_THAT(error_with("", {}, {"re:.*down_proj"}),
              HasSubstr("mlp.down_proj is not quantized, but model.layers.0.mlp.down_proj.weight is "
                        "F8_E4M3 with scales"));
  EXPECT_THAT(error_with("re:.*down_proj", {{"format", "mxfp4-pack-quantized"}, {"weights", {{"num_bits", 4}}}}, {}),
              HasSubstr("mlp.down_proj is e2m1 with quantized inputs, but model.layers.0.mlp.down_proj.weight is F8_E4M3"));
  sets.back() = "precision.recipe=high";
  run("high", sets);
  export_to(checkpoint("high", 3), "values");
  nlohmann::json plain = nlohmann::json::parse(test::read_file(path("values/config.json")));
  plain["quantization_config"] = written["quantization_config"];
  test::write_file(path("values/config.json"), plain.dump());
  EXPECT_THAT(folder_error("values").what(), HasSubstr("self_attn.q_proj is e4m3 with quantized inputs, but "
                                                       "model.layers.0.self_attn.q_proj.weight is BF16 without scales"));
}

// Lists as they were published: they say of this folder what is true as transformers reads them.
TEST_F(Exports, AListThatServersReadOtherwiseIsTold) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=mxfp8", "model.num_layers=11",
                           R"(precision.rules=[{"match": "layers.1.*", "recipe": "high"}])"});
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed", Convention::sglang);
  const nlohmann::json written = nlohmann::json::parse(test::read_file(path("packed/config.json")));
  const nlohmann::json names = written["quantization_config"]["modules_to_not_convert"];
  const auto findings_with = [&](const nlohmann::json& list) {
    nlohmann::json config = written;
    config["quantization_config"]["modules_to_not_convert"] = list;
    test::write_file(path("packed/config.json"), config.dump());
    return HfWeights(path("packed")).ignore_list_findings();
  };
  const auto and_also = [&](const char* entry) {
    nlohmann::json list = names;
    list.push_back(entry);
    return list;
  };
  EXPECT_THAT(findings_with(names), IsEmpty());
  EXPECT_THAT(findings_with(and_also("mlp.gate")), ElementsAre(HasSubstr("modules_to_not_convert: \"mlp.gate\" also names")));
  EXPECT_THAT(findings_with(and_also("model.layers.1")), ElementsAre(HasSubstr("codes: model.layers.10.")));
  EXPECT_THAT(findings_with(and_also("model.layers.0.self_attn.qkv_proj")),
              ElementsAre(HasSubstr("codes: model.layers.0.self_attn.q_proj, ")));
  EXPECT_THAT(findings_with(and_also("model.language_model.layers.1")), ElementsAre(HasSubstr("layers.1\" names nothing in the file")));
  EXPECT_THAT(findings_with({"lm_head", "model\\.layers\\.1\\..*"}),
              ElementsAre(HasSubstr("whole names no entry names what holds no codes: model.layers.1.")));
  pack_to(checkpoint("run", 3), "modelopt", Convention::modelopt);
  nlohmann::json two = nlohmann::json::parse(test::read_file(path("modelopt/config.json")));
  for (const char* key : {"ignore", "exclude_modules"}) two["quantization_config"][key].push_back("no.module");
  test::write_file(path("modelopt/config.json"), two.dump());
  EXPECT_THAT(HfWeights(path("modelopt")).ignore_list_findings(),
              ElementsAre(HasSubstr("ignore: \"no.module\" names nothing"), HasSubstr("exclude_modules: \"no.module\" names nothing")));
  const test::ProcessResult result = test::run_mantissa({"verify", "packed", "--against", run_folder("run")}, folder_.path());
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.errors + result.output, HasSubstr("no entry names what holds no codes"));
}

// Which inputs are quantized stands nowhere else.
TEST_F(Exports, CodesNeedWhatSaysHowTheyAreMultiplied) {
  std::vector<std::string> sets = kShape;
  sets.push_back("precision.dtype=bf16");
  sets.push_back("precision.recipe=mxfp8");
  sets.push_back(R"(precision.rules=[{"match": "layers.0.*", "recipe": "high"}])");
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed", Convention::modelopt);
  nlohmann::json config = nlohmann::json::parse(test::read_file(path("packed/config.json")));
  config.erase("quantization_config");
  test::write_file(path("packed/config.json"), config.dump());
  EXPECT_EQ(logits_of(path("packed")), logits_of(checkpoint("run", 3)));
  const std::string side = path("packed/hf_quant_config.json");
  nlohmann::json other = nlohmann::json::parse(test::read_file(side));
  other["quantization"]["exclude_modules"].push_back("*.down_proj");
  test::write_file(side, other.dump());
  EXPECT_THAT(
      folder_error("packed").what(),
      HasSubstr(side +
                ": quantization: model.layers.1.mlp.down_proj is not quantized, but model.layers.1.mlp.down_proj.weight is F8_E4M3"));
  std::filesystem::remove(side);
  const Error error = folder_error("packed");
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr(".weight is F8_E4M3 with scales, but config.json has no quantization_config"));
}

TEST_F(Exports, WeightsThatForwardSimulatesAreExportedAsTheyAreWithAWarning) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=mine",
                           R"(precision.recipes={"mine": {"simulate": {"weight": {"format": "e3m2"}}, "gemms": ["fprop", "dgrad"]}})"});
  run("simulated", sets);
  const auto warnings = [&](const std::string& name) { return ModelExport(checkpoint(name, 3), {}, make_backend("cpu")).warnings(); };
  const std::string rounded =
      "forward rounds 8 weights, the first of layers.0.attn.qkv, to e3m2 1x32 rceil (recipe mine); an export has them unrounded";
  EXPECT_THAT(warnings("simulated"), ::testing::Contains(rounded));
  const test::ProcessResult written = test::run_mantissa({"export", run_folder("simulated"), "--output", "out"}, folder_.path());
  EXPECT_THAT(written.output, HasSubstr("read back and equal to the weights, which forward rounds\n"));
  const test::ProcessResult verified = test::run_mantissa({"verify", "out", "--against", run_folder("simulated")}, folder_.path());
  EXPECT_EQ(verified.exit_code, 0);
  EXPECT_THAT(verified.output, HasSubstr("from the weights in "));
  EXPECT_THAT(verified.errors, HasSubstr(rounded));
  sets.back() = R"(precision.recipes={"mine": {"simulate": {"weight": {"format": "e3m2"}}, "gemms": ["dgrad"]}})";
  run("exact", sets);
  EXPECT_THAT(warnings("exact"), ::testing::Not(::testing::Contains(HasSubstr("unrounded"))));
}

// Forward multiplies by codes, whatever backward rounds.
TEST_F(Exports, CodesBesideSimulatedGradientsArePacked) {
  std::vector<std::string> sets = kShape;
  sets.insert(sets.end(),
              {"precision.dtype=bf16", "precision.recipe=mine",
               R"(precision.recipes={"mine": {"base": "mxfp8", "output_grad": null, "simulate": {"output_grad": {"format": "e5m2"}}}})"});
  run("run", sets);
  pack_to(checkpoint("run", 3), "packed");
  EXPECT_EQ(difference("packed", checkpoint("run", 3)), std::nullopt);
}

TEST_F(Exports, WhatNoServerReadsIsRefusedByModuleAndRule) {
  const std::string moe = R"(model.moe={"num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96})";
  struct Refused {
    std::string name, why;
    std::vector<std::string> sets;
  };
  const std::vector<Refused> refusals = {
      {"e5m2",
       "layers.0.attn.qkv (recipe mine, e5m2 1x32 rceil): no server reads E5M2 weights",
       {"precision.recipe=mine",
        R"(precision.recipes={"mine": {"base": "mxfp8_weights", "weight": {"format": "e5m2", "block": [1, 32]}}})"}},
      {"input_range",
       "its input is e4m3 1x32 rceil 2^-22..2^127, and servers quantize inputs to E4M3 only, by rceil with any scale",
       {"precision.recipe=mine", R"(precision.recipes={"mine": {"base": "mxfp8", "input": {"scale_range": [-22, 127]}}})"}},
      {"input_rule",
       "its input is e4m3 1x32 floor, and servers quantize inputs to E4M3 only, by rceil with any scale",
       {"precision.recipe=mine", R"(precision.recipes={"mine": {"base": "mxfp8", "input": {"rule": "floor"}}})"}},
      {"blocks16",
       "packed weights have blocks of 32",
       {"precision.recipe=mine", R"(precision.recipes={"mine": {"base": "mxfp4_qat", "weight_fake_quant": {"block": [1, 16]}}})"}},
      {"blocks64",
       "packed weights have blocks of 32",
       {"precision.recipe=mine", "model.num_attention_heads=2", "model.intermediate_size=128",
        R"(precision.recipes={"mine": {"base": "mxfp4_qat", "weight_fake_quant": {"block": [1, 64]}}})"}},
      {"inputs",
       "its input is e5m2 1x32 rceil, and servers quantize inputs to E4M3 only",
       {"precision.recipe=mine", R"(precision.recipes={"mine": {"base": "mxfp8", "input": {"format": "e5m2"}}})"}},
      {"simulated",
       "layers.0.attn.qkv (recipe mine) is trained on simulated operands, which have no codes",
       {"precision.recipe=mine",
        R"(precision.recipes={"mine": {"simulate": {"weight": {"format": "e3m2"}}, "gemms": ["fprop", "dgrad"]}})"}},
      {"gpt2",
       "GPT-2 keeps its weights [in, out], where no server reads blocks",
       {"precision.recipe=mxfp8_weights", "model.norm=layer", "model.norm_bias=true", "model.position=learned",
        "model.activation=gelu_tanh", "model.attention_bias=all", "model.mlp_bias=true", "model.qk_norm=false",
        "model.num_attention_heads=2", "model.num_key_value_heads=2"}},
      {"fused",
       "layers.0.moe.experts.gate_up has recipe mxfp8 (precision.rules.0) and layers.0.moe.experts.down has mxfp4_qat (precision.rules.1)",
       {moe,
        R"(precision.rules=[{"match": "layers.*.moe.experts.gate_up", "recipe": "mxfp8"}, {"match": "layers.*.moe.experts.down", "recipe": "mxfp4_qat"}])"}}};
  for (const Refused& refused : refusals) {
    std::vector<std::string> sets = kShape;
    sets.push_back("precision.dtype=bf16");
    sets.insert(sets.end(), refused.sets.begin(), refused.sets.end());
    run(refused.name, sets);
    const Error error = test::error_of([&] { pack_to(checkpoint(refused.name, 3), "refused"); });
    EXPECT_EQ(error.code(), ExitCode::usage) << refused.name;
    EXPECT_THAT(error.what(), HasSubstr(refused.why));
    export_to(checkpoint(refused.name, 3), refused.name + " values");
  }
}

}  // namespace mantissa::packed_export_test
