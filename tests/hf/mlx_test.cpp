// Folders for mlx-lm: names, what config.json says of codes, and models that mlx-lm computes otherwise.
#include "hf/mlx.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <set>

#include "architecture_configs.h"

namespace mantissa::mlx_test {

using nlohmann::json;
using test::config_of;
using test::error_of;
using test::read;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;

constexpr PackedScheme kEight{.format = Format::e4m3, .inputs = Format::none}, kFour{.format = Format::e2m1, .inputs = Format::none};

std::set<std::string> names_of(const std::string& type) {
  const ArchitectureConfig config = read(config_of(type));
  std::set<std::string> names;
  for (const ArchitectureTensor& tensor : architecture_tensors(config.architecture, config.model, ExportFormat::mlx)) {
    EXPECT_FALSE(tensor.transposed) << tensor.name;
    names.insert(text(tensor.name, ' ', shape_text(tensor.shape)));
  }
  return names;
}

// Names and shapes are those of the modules of mlx_lm/models.
TEST(Mlx, ExpertsAreStackedAndNothingIsTransposed) {
  EXPECT_THAT(names_of("qwen3_moe"),
              IsSupersetOf({"model.layers.0.mlp.switch_mlp.gate_proj.weight [6, 64, 96]", "model.layers.0.mlp.gate.weight [6, 96]",
                            "model.layers.0.mlp.switch_mlp.up_proj.weight [6, 64, 96]", "model.layers.1.mlp.up_proj.weight [160, 96]",
                            "model.layers.0.mlp.switch_mlp.down_proj.weight [6, 96, 64]"}));
  EXPECT_THAT(names_of("mixtral"), IsSupersetOf({"model.layers.0.block_sparse_moe.gate.weight [6, 96]",
                                                 "model.layers.0.block_sparse_moe.switch_mlp.gate_proj.weight [6, 160, 96]",
                                                 "model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight [6, 160, 96]",
                                                 "model.layers.0.block_sparse_moe.switch_mlp.down_proj.weight [6, 96, 160]"}));
  EXPECT_THAT(
      names_of("gpt_oss"),
      IsSupersetOf({"model.layers.0.mlp.experts.gate_proj.weight [6, 160, 96]", "model.layers.0.mlp.experts.gate_proj.bias [6, 160]",
                    "model.layers.0.mlp.experts.up_proj.weight [6, 160, 96]", "model.layers.0.mlp.experts.down_proj.bias [6, 96]",
                    "model.layers.0.mlp.router.bias [6]", "model.layers.0.self_attn.sinks [4]"}));
  EXPECT_THAT(names_of("gpt2"), IsSupersetOf({"model.wte.weight [259, 96]", "model.wpe.weight [64, 96]", "model.ln_f.bias [96]",
                                              "model.h.0.attn.c_attn.weight [288, 96]", "model.h.1.mlp.c_proj.weight [96, 384]"}));
}

TEST(Mlx, QuantizationHasAnEntryForEachModuleThatDiffers) {
  PackedModules modules = {{"lm_head", {}},
                           {"model.layers.0.mlp.gate", {}},
                           {"model.layers.0.mlp.switch_mlp.down_proj", kFour},
                           {"model.layers.0.mlp.switch_mlp.up_proj", kFour},
                           {"model.layers.0.self_attn.q_proj", kEight}};
  const json expected = json::parse(R"({"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4", "lm_head": false,
      "model.layers.0.mlp.gate": false, "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"}}})");
  EXPECT_EQ(json::parse(mlx_quantization(modules)), expected);
  const PackedConfig again(mlx_quantization(modules), "config.json");
  for (const auto& [name, scheme] : modules) EXPECT_EQ(again.scheme(name), scheme) << name;
  EXPECT_FALSE(again.names_modules());
  modules = {{"lm_head", {}}, {"model.layers.0.mlp.up_proj", PackedScheme{.format = Format::e4m3, .inputs = Format::e4m3}}};
  const json inputs = json::parse(mlx_quantization(modules));
  EXPECT_EQ(inputs["quantize_activations"], true);
  EXPECT_EQ(inputs["quantization"]["mode"], "mxfp8");
  const PackedConfig quantized(inputs.dump(), "config.json");
  EXPECT_EQ(quantized.scheme("model.layers.0.mlp.up_proj"), modules.at("model.layers.0.mlp.up_proj"));
  EXPECT_EQ(quantized.scheme("model.layers.0.mlp.switch_mlp.up_proj"), kEight) << "inputs of experts stay as they are";
}

TEST(Mlx, QuantizationIsReadOrRefusedByItsKey) {
  const json good = json::parse(R"({"group_size": 32, "bits": 8, "mode": "mxfp8", "a": true, "b": false})");
  const auto packed = [](const json& quantization) { return PackedConfig(json{{"quantization", quantization}}.dump(), "config.json"); };
  EXPECT_EQ(packed(good).scheme("a"), kEight);
  EXPECT_EQ(packed(good).scheme("b"), std::nullopt);
  const std::vector<std::pair<const char*, const char*>> refusals = {
      {R"({"mode": "affine"})", "config.json: quantization.mode = \"affine\""},
      {R"({"mode": null})", "config.json: quantization.mode is missing: mlx-lm takes affine"},
      {R"({"group_size": 64})", "config.json: quantization.group_size = 64"},
      {R"({"bits": 4})", "config.json: quantization.bits = 4"},
      {R"({"c": 5})", "config.json: quantization.c must be true, false or an object, got 5"},
      {R"({"c": {"group_size": 32, "bits": 5, "mode": "mxfp4"}})", "config.json: quantization.c.bits = 5"},
      {R"({"c": {"group_size": 32, "bits": 4, "mode": "mxfp4", "d": 1}})", "quantization.c.d = 1"}};
  for (const auto& [change, what] : refusals) {
    json other = good;
    other.merge_patch(json::parse(change));
    EXPECT_THAT(error_of([&] { packed(other); }).what(), HasSubstr(what));
  }
}

TEST(Mlx, TheKeysOfConfigJsonComeBack) {
  const json keys = json::parse(R"({"quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8"}, "quantize_activations": true})");
  const ArchitectureConfig found = read(config_of("qwen3", keys));
  EXPECT_EQ(json::parse(found.quantization), keys);
  const json written = json::parse(architecture_config(found.model, found.dtype, {}, found.quantization));
  EXPECT_EQ(written["quantization"], keys["quantization"]);
  EXPECT_EQ(written["quantize_activations"], true);
  EXPECT_FALSE(written.contains("quantization_config"));
  // mlx-lm writes both, and reads its own.
  json both = {{"quantization", keys["quantization"]}};
  const json own = both;
  both["quantization_config"] = {{"quant_method", "other"}};
  EXPECT_EQ(json::parse(read(config_of("qwen3", both)).quantization), own);
  EXPECT_THAT(error_of([] {
                read(config_of("qwen3", {{"quantize_activations", true}}));
              }).what(),
              HasSubstr("quantize_activations = true: there is no quantization"));
  EXPECT_THAT(error_of([] { read(config_of("qwen3", {{"quantization", 5}})); }).what(), HasSubstr("quantization must be an object"));
}

// A change of a config.json, and the option that mlx-lm does not compute so.
TEST(Mlx, ModelsThatItComputesOtherwiseAreToldByOption) {
  struct Difference {
    const char *type, *change, *option;
  };
  const std::string windows = R"("layer_types": ["sliding_attention", "full_attention", "full_attention"], "tie_word_embeddings": false)";
  const auto differences = [&](const std::string& type, const json& change) {
    json config = config_of(type, change);
    if (type == "gpt_oss" && !change.contains("layer_types")) config.update(json::parse("{" + windows + "}"));
    if (type == "gpt_oss") config["rope_scaling"] = change.value("rope_scaling", json({{"rope_type", "default"}}));
    if (type == "gpt_oss" && change.contains("tie_word_embeddings")) config["tie_word_embeddings"] = change["tie_word_embeddings"];
    if (type == "mixtral" && !change.contains("head_dim")) config["head_dim"] = 24;
    const ArchitectureConfig found = read(config);
    return mlx_differences(found.architecture, found.model);
  };
  for (const char* type : test::kArchitectureTypes) EXPECT_THAT(differences(type, json::object()), IsEmpty()) << type;
  const char* const yarn = R"({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})";
  for (const char* type : {"llama", "qwen2", "qwen3", "gpt_oss"}) EXPECT_THAT(differences(type, json::parse(yarn)), IsEmpty()) << type;
  const std::vector<Difference> all = {
      {"gpt_oss", R"({"swiglu_limit": 1.5})", "model.swiglu_limit: mlx-lm clamps at 7"},
      {"llama", R"({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3}})",
       "model.rope_scaling.attention_factor: "},
      {"gpt_oss", R"({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": false}})", "model.rope_scaling.truncate: "},
      {"qwen3_moe", yarn, "model.rope_scaling: "},
      {"mixtral", yarn, "model.rope_scaling: "},
      {"qwen2", R"({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1})", "model.sliding_window: "},
      {"qwen3", R"({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1})", "model.sliding_window: "},
      {"qwen3_moe", R"({"use_sliding_window": true, "sliding_window": 8})", "model.sliding_window: "},
      {"mixtral", R"({"sliding_window": 8})", "model.sliding_window: "},
      {"gpt_oss", R"({"layer_types": ["full_attention", "full_attention", "full_attention"], "tie_word_embeddings": false})",
       "model.sliding_layers: "},
      {"qwen2", R"({"head_dim": 32})", "model.head_dim: "},
      {"mixtral", R"({"head_dim": 32})", "model.head_dim: "},
      {"qwen3", R"({"attention_bias": true})", "model.attention_bias: "},
      {"qwen3_moe", R"({"attention_bias": true})", "model.attention_bias: "},
      {"gpt2", R"({"activation_function": "gelu"})", "model.activation: "},
      {"gpt2", R"({"n_inner": 96})", "model.intermediate_size: "},
      {"gpt2", R"({"tie_word_embeddings": false})", "model.tie_word_embeddings: "},
      {"gpt_oss", R"({"tie_word_embeddings": true})", "model.tie_word_embeddings: "}};
  for (const auto& [type, change, option] : all) {
    SCOPED_TRACE(text(type, ' ', change));
    EXPECT_THAT(differences(type, json::parse(change)), ElementsAre(HasSubstr(option)));
  }
}

TEST(Mlx, SaysInWhichTypeItComputes) {
  const auto said = [](MlxTypes types) { return mlx_rounding(types); };
  const std::string same = "mlx-lm computes in fp32 and rounds nothing that forward here does not";
  EXPECT_EQ(said({.architecture = Architecture::qwen3, .activations = FileDtype::f32, .trained = Dtype::f32}), same);
  EXPECT_EQ(said({.architecture = Architecture::qwen3, .activations = FileDtype::f32, .trained = Dtype::bf16}),
            same + ", which computes in bf16");
  EXPECT_EQ(said({.architecture = Architecture::llama, .activations = FileDtype::bf16, .trained = Dtype::f32}),
            "mlx-lm rounds activations to bf16 everywhere, which forward here does not");
  EXPECT_EQ(said({.architecture = Architecture::mixtral, .activations = FileDtype::f16, .trained = Dtype::bf16}),
            "mlx-lm rounds activations to fp16 before the first router, which forward here does not");
  EXPECT_THAT(said({.architecture = Architecture::gpt_oss, .activations = FileDtype::bf16, .trained = Dtype::bf16}),
              HasSubstr("as forward here does, and rounds before the first router"));
  MlxTypes wide{.architecture = Architecture::qwen3, .activations = FileDtype::f32, .widened_by = "norm", .trained = Dtype::bf16};
  EXPECT_EQ(said(wide), "mlx-lm computes in bf16 up to norm and in fp32 from there on, because norm is F32; forward here in bf16");
  wide.at_once = true;
  EXPECT_EQ(said(wide), same + ", which computes in bf16, because norm is F32");
  wide.as_forward = false;
  EXPECT_EQ(said(wide), "mlx-lm computes in fp32; forward here computes in bf16, because norm is F32");
  EXPECT_THAT(said({.trained = Dtype::bf16, .as_forward = false}), ::testing::StartsWith("mlx-lm computes in bf16, and rounds everywhere"));
  EXPECT_THAT(said({.trained = Dtype::bf16, .mxfp8_inputs = true}),
              ::testing::StartsWith("mlx-lm computes in bf16 with inputs of packed linears in MXFP8 as forward here does, and rounds"));
}

}  // namespace mantissa::mlx_test
