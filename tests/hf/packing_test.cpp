// quantization_config: what is written of packed modules, and which scheme a linear has by what others wrote.
#include "mantissa/hf/packing.h"

#include <gmock/gmock.h>

#include <array>
#include <nlohmann/json.hpp>

#include "files.h"

namespace mantissa::packing_test {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr PackedScheme kMxfp8{.format = Format::e4m3, .inputs = true}, kMxfp8Weights{.format = Format::e4m3, .inputs = false},
    kMxfp4{.format = Format::e2m1, .inputs = false};

json operand(int bits, bool dynamic) {
  return {{"num_bits", bits},  {"type", "float"},    {"strategy", "group"},         {"group_size", 32},
          {"symmetric", true}, {"dynamic", dynamic}, {"scale_dtype", "torch.uint8"}};
}

TEST(Packing, OneSchemeIsThatOfAllLinearsButThoseThatAreIgnored) {
  const PackedModules modules = {{"lm_head", {}},
                                 {"model.layers.0.mlp.gate", {}},
                                 {"model.layers.0.mlp.gate_proj", kMxfp8},
                                 {"model.layers.1.mlp.experts.0.up_proj", {}},
                                 {"model.layers.1.mlp.experts.10.up_proj", {}}};
  const json ignore = {"lm_head", "model.layers.0.mlp.gate", R"(re:model\.layers\.1\.mlp\.experts\.\d+\.up_proj$)"};
  const json names = {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts"},
             wildcards = {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts*"};
  const auto config = [&](Convention convention) { return json::parse(quantization_config(modules, convention)); };
  EXPECT_EQ(config(Convention::compressed_tensors), (json{{"quant_method", "compressed-tensors"},
                                                          {"format", "mxfp8-quantized"},
                                                          {"quantization_status", "compressed"},
                                                          {"version", "0.12.0"},
                                                          {"global_compression_ratio", nullptr},
                                                          {"kv_cache_scheme", nullptr},
                                                          {"ignore", ignore},
                                                          {"config_groups",
                                                           {{"group_0",
                                                             {{"targets", {"Linear"}},
                                                              {"format", "mxfp8-quantized"},
                                                              {"weights", operand(8, false)},
                                                              {"input_activations", operand(8, true)}}}}}}));
  EXPECT_EQ(config(Convention::sglang), (json{{"quant_method", "mxfp8"},
                                              {"activation_scheme", "dynamic"},
                                              {"fmt", "e4m3"},
                                              {"weight_block_size", {1, 32}},
                                              {"scale_fmt", "ue8m0"},
                                              {"modules_to_not_convert", names}}));
  EXPECT_EQ(config(Convention::modelopt), (json{{"quant_method", "modelopt"},
                                                {"quant_algo", "MXFP8"},
                                                {"group_size", 32},
                                                {"ignore", wildcards},
                                                {"producer", {{"name", "mantissa"}}}}));
  EXPECT_EQ(json::parse(modelopt_side_file(modules)),
            (json{{"producer", {{"name", "mantissa"}}},
                  {"quantization",
                   {{"quant_algo", "MXFP8"}, {"group_size", 32}, {"kv_cache_quant_algo", nullptr}, {"exclude_modules", wildcards}}}}));
}

TEST(Packing, SeveralSchemesAreGroupsWithTheirTargets) {
  const PackedModules modules = {{"lm_head", {}},
                                 {"model.layers.0.mlp.experts.0.up_proj", kMxfp4},
                                 {"model.layers.0.mlp.experts.1.up_proj", kMxfp4},
                                 {"model.layers.0.self_attn.q_proj", kMxfp8}};
  const json eight = {{"targets", {"model.layers.0.self_attn.q_proj"}},
                      {"format", "mxfp8-quantized"},
                      {"weights", operand(8, false)},
                      {"input_activations", operand(8, true)}},
             four = {{"targets", {R"(re:model\.layers\.0\.mlp\.experts\.\d+\.up_proj$)"}},
                     {"format", "mxfp4-pack-quantized"},
                     {"weights", operand(4, false)}};
  const json config = json::parse(quantization_config(modules, Convention::compressed_tensors));
  EXPECT_EQ(config["format"], "mixed-precision");
  EXPECT_EQ(config["ignore"], json({"lm_head"}));
  const json groups = config["config_groups"];
  ASSERT_EQ(groups.size(), 2U);
  const bool first = groups["group_0"] == eight;
  EXPECT_EQ(groups[first ? "group_0" : "group_1"], eight);
  EXPECT_EQ(groups[first ? "group_1" : "group_0"], four);
  for (const Convention convention : {Convention::sglang, Convention::modelopt}) {
    EXPECT_THAT(test::error_of([&] { quantization_config(modules, convention); }).what(), HasSubstr("experts.0.up_proj is E2M1"));
    const PackedModules weights_only = {{"model.layers.0.mlp.up_proj", PackedScheme{.format = Format::e4m3, .inputs = false}}};
    EXPECT_THAT(test::error_of([&] { quantization_config(weights_only, convention); }).what(),
                HasSubstr("up_proj reads its input in high precision"));
  }
  EXPECT_EQ(json::parse(mxfp4_config()),
            (json{{"quant_method", "mxfp4"},
                  {"modules_to_not_convert", {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}}}));
}

// As DeepSeek-V3 and -V4, and Qwen3-FP8.
TEST(Packing, BlockFp8IsOneConfigOfAllLinearsAndSaysWhatExpertsAre) {
  constexpr PackedScheme kFourBits{.format = Format::e2m1, .inputs = true};
  PackedModules modules = {{"lm_head", {}}, {"model.layers.0.mlp.experts.0.up_proj", kMxfp8}, {"model.layers.0.self_attn.q_proj", kMxfp8}};
  const json expected = {{"quant_method", "fp8"},           {"activation_scheme", "dynamic"}, {"fmt", "e4m3"},
                         {"weight_block_size", {128, 128}}, {"scale_fmt", "ue8m0"},           {"modules_to_not_convert", {"lm_head"}}};
  EXPECT_EQ(json::parse(quantization_config(modules, Convention::fp8)), expected);
  modules["model.layers.0.mlp.experts.0.up_proj"] = kFourBits;
  json with_experts = expected;
  with_experts["expert_dtype"] = "fp4";
  EXPECT_EQ(json::parse(quantization_config(modules, Convention::fp8)), with_experts);
  modules["model.layers.1.mlp.experts.0.up_proj"] = kMxfp8;
  const Error error = test::error_of([&] { quantization_config(modules, Convention::fp8); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("model.layers.0.mlp.experts.0.up_proj is e2m1 and model.layers.1.mlp.experts.0.up_proj is e4m3"));
}

TEST(Packing, ServersOfBlockFp8MayHaveALeastScaleOfInputs) {
  const Quantization any{.format = Format::e4m3, .block_cols = 128};
  const auto with_range = [&](ScaleRange range) {
    Quantization input = any;
    input.range = range;
    return input;
  };
  for (const int64_t block : {32, 128}) {
    EXPECT_TRUE(as_servers_quantize(any, block));
    EXPECT_EQ(as_servers_quantize(with_range({.least = 105, .most = 254}), block), block == 128);
    EXPECT_FALSE(as_servers_quantize(with_range({.least = 104, .most = 254}), block));
    EXPECT_FALSE(as_servers_quantize({.format = Format::e5m2}, block));
    EXPECT_FALSE(as_servers_quantize({.format = Format::e4m3, .rule = ScaleRule::floor}, block));
  }
}

TEST(Packing, NamesAreThoseOfTheConventions) {
  const auto names = [](const char* weight, Format format, Convention convention) {
    const PackedNames both = packed_names(weight, format, convention);
    return both.codes + " " + both.scales;
  };
  EXPECT_EQ(names("a.weight", Format::e4m3, Convention::compressed_tensors), "a.weight a.weight_scale");
  EXPECT_EQ(names("a.weight", Format::e2m1, Convention::compressed_tensors), "a.weight_packed a.weight_scale");
  EXPECT_EQ(names("a.weight", Format::e4m3, Convention::modelopt), "a.weight a.weight_scale");
  EXPECT_EQ(names("a.weight", Format::e4m3, Convention::sglang), "a.weight a.weight_scale_inv");
  EXPECT_EQ(names("a.gate_up_proj", Format::e2m1, Convention::compressed_tensors), "a.gate_up_proj_blocks a.gate_up_proj_scales");
  for (const Format format : {Format::e4m3, Format::e2m1})
    EXPECT_EQ(names("a.weight", format, Convention::fp8), "a.weight a.weight_scale_inv");
}

json group(const std::vector<std::string>& targets, int bits, bool inputs) {
  json out = {{"targets", targets}, {"weights", operand(bits, false)}};
  if (inputs) out["input_activations"] = operand(8, true);
  return out;
}

json quantization(const json& groups, const json& ignore = json::array()) {
  return {{"quant_method", "compressed-tensors"}, {"quantization_status", "compressed"}, {"config_groups", groups}, {"ignore", ignore}};
}

PackedConfig packed(const json& config) { return PackedConfig(config.dump(), "config.json"); }
Error packed_error(const json& config) {
  return test::error_of([&] { packed(config); });
}

// As match_targets() of compressed-tensors 0.20 orders them, whatever the order of the groups.
TEST(PackedConfigs, ANameGoesBeforeExpressionsAndThoseBeforeTheClass) {
  const std::string module = "model.layers.0.mlp.down_proj";
  const json by_class = group({"Linear"}, 8, true), by_expression = group({"re:.*down_proj"}, 8, false),
             by_name = group({module}, 4, false);
  for (const auto& order : std::vector<std::array<json, 3>>{{by_class, by_expression, by_name}, {by_name, by_expression, by_class}}) {
    const PackedConfig config = packed(quantization({{"a", order[0]}, {"b", order[1]}, {"c", order[2]}}));
    EXPECT_EQ(config.scheme(module), kMxfp4);
    EXPECT_EQ(config.scheme("model.layers.1.mlp.down_proj"), kMxfp8Weights);
    EXPECT_EQ(config.scheme("model.layers.1.mlp.up_proj"), kMxfp8);
  }
  const PackedConfig two = packed(quantization({{"a", group({"re:.*proj"}, 8, true)}, {"b", group({"re:.*down.*"}, 4, false)}}));
  EXPECT_EQ(two.scheme(module), kMxfp4);  // by alphabet
  EXPECT_EQ(two.scheme("model.layers.0.mlp.gate"), std::nullopt);
  const PackedConfig above = packed(quantization({{"a", group({"Module"}, 8, true)}, {"b", group({"Linear"}, 4, false)}}));
  EXPECT_EQ(above.scheme(module), kMxfp4);
  EXPECT_EQ(packed(quantization({{"a", group({"Module"}, 8, true)}})).scheme(module), kMxfp8);
  EXPECT_EQ(packed(quantization({{"a", group({"Embedding"}, 8, true)}})).scheme(module), std::nullopt);
}

TEST(PackedConfigs, ExpressionsBeginWithTheNameAndNeedNotEndWithIt) {
  const auto matches = [](const std::string& target, const std::string& module) {
    return packed(quantization({{"a", group({target}, 8, true)}})).scheme(module).has_value();
  };
  EXPECT_TRUE(matches("re:model.layers", "model.layers.0.mlp.up_proj"));
  EXPECT_FALSE(matches("re:mlp", "model.layers.0.mlp.up_proj"));
  EXPECT_TRUE(matches("re:.*mlp\\.gate", "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(matches("re:.*mlp\\.gate$", "model.layers.0.mlp.gate_proj"));
  EXPECT_TRUE(matches("re:lm_head|model.*", "model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(matches("model.layers", "model.layers.0.mlp.up_proj"));
  for (const char* target : {"re:(", "re:a)|(b"}) {
    const Error error = packed_error(quantization({{"a", group({target}, 8, true)}}));
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(text("config.json: quantization_config.config_groups: \"", target, "\" ")));
  }
}

// JSON here has no order, so the later of two groups cannot be told.
TEST(PackedConfigs, ATargetHasOneScheme) {
  for (const char* target : {"Linear", "re:.*proj"}) {
    const Error error = packed_error(quantization({{"z", group({target}, 8, true)}, {"b", group({"lm_head", target}, 4, false)}}));
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(text("config.json: quantization_config.config_groups: b and z both name the target \"", target,
                                             "\", with different schemes")));
    EXPECT_EQ(packed(quantization({{"z", group({target}, 8, true)}, {"b", group({target}, 8, true)}})).scheme("up_proj"), kMxfp8);
  }
}

TEST(PackedConfigs, AnExpressionThatNeedsTooManyStepsIsNamedWithItsPlace) {
  const std::string steps = R"(re:(a*)*(a*)*(a*)*$)", module(40, 'a');
  const json groups = {{"a", group({"Linear"}, 8, true)}};
  const Error ignored = test::error_of([&] { (void)packed(quantization(groups, {steps})).scheme(module + "b"); });
  EXPECT_EQ(ignored.code(), ExitCode::usage);
  EXPECT_THAT(ignored.what(), HasSubstr("config.json: quantization_config.ignore: \"" + steps + "\" "));
  const Error target = test::error_of([&] { (void)packed(quantization({{"a", group({steps}, 8, true)}})).scheme(module + "b"); });
  EXPECT_THAT(target.what(), HasSubstr("config.json: quantization_config.config_groups: \"" + steps + "\" "));
}

TEST(PackedConfigs, WhatIsIgnoredHasNoScheme) {
  const json groups = {{"a", group({"Linear", "model.layers.0.mlp.up_proj"}, 8, true)}};
  const PackedConfig config = packed(quantization(groups, {"lm_head", "re:.*mlp\\.up_proj"}));
  EXPECT_EQ(config.scheme("lm_head"), std::nullopt);
  EXPECT_EQ(config.scheme("lm_heads"), kMxfp8);
  EXPECT_EQ(config.scheme("model.layers.0.mlp.up_proj"), std::nullopt);
  EXPECT_EQ(config.scheme("model.layers.0.mlp.down_proj"), kMxfp8);
  EXPECT_EQ(packed(quantization(groups, {"Linear"})).scheme("lm_head"), std::nullopt);
  EXPECT_EQ(packed(quantization(groups, nullptr)).scheme("lm_head"), kMxfp8);
}

TEST(PackedConfigs, WhatIsNeutralIsTakenAndAllElseRefusedByName) {
  const json good = quantization({{"a", group({"Linear"}, 8, true)}});
  json neutral = good;
  neutral.update({{"version", "0.20.0"}, {"format", "mxfp8-quantized"}, {"kv_cache_scheme", nullptr}, {"sparsity_config", json::object()}});
  neutral["config_groups"]["a"].update({{"format", "mxfp8-quantized"}, {"output_activations", nullptr}});
  neutral["config_groups"]["a"]["weights"].update({{"observer", "minmax"}, {"block_structure", nullptr}, {"actorder", nullptr}});
  EXPECT_EQ(packed(neutral).scheme("x"), kMxfp8);
  struct Wrong {
    const char* pointer;
    json value;
    const char* what;
    ExitCode code = ExitCode::usage;
  };
  const std::vector<Wrong> wrongs = {
      {"/kv_cache_scheme", {{"num_bits", 8}}, "quantization_config.kv_cache_scheme = "},
      {"/transform_config", {{"config_groups", 1}}, "quantization_config.transform_config = "},
      {"/quantization_status", "frozen", "quantization_config.quantization_status = \"frozen\""},
      {"/format", "nvfp4-pack-quantized", "quantization_config.format = "},
      {"/mystery", 1, "quantization_config.mystery = 1"},
      {"/config_groups", nullptr, "quantization_config.config_groups is missing", ExitCode::data},
      {"/config_groups/a", {"Linear"}, "quantization_config.config_groups.a is the name of a scheme"},
      {"/config_groups/a/mystery", 1, "quantization_config.config_groups.a.mystery = 1"},
      {"/config_groups/a/output_activations", 1, "quantization_config.config_groups.a.output_activations = 1"},
      {"/config_groups/a/format", "mxfp4-pack-quantized", "quantization_config.config_groups.a.format = "},
      {"/config_groups/a/targets", nullptr, "quantization_config.config_groups.a.targets is missing", ExitCode::data},
      {"/config_groups/a/targets", {1}, "config_groups.a.targets must be a list of names", ExitCode::data},
      {"/ignore", "lm_head", "quantization_config.ignore must be a list of names", ExitCode::data},
      {"/config_groups/a/weights", nullptr, "config_groups.a.weights is missing", ExitCode::data},
      {"/config_groups/a/weights/mystery", 1, "config_groups.a.weights.mystery = 1"},
      {"/config_groups/a/weights/dynamic", true, "config_groups.a.weights.dynamic = true"},
      {"/config_groups/a/weights/symmetric", false, "config_groups.a.weights.symmetric = false"},
      {"/config_groups/a/weights/num_bits", 6, "config_groups.a.weights.num_bits = 6"},
      {"/config_groups/a/weights/type", "int", "config_groups.a.weights.type = \"int\""},
      {"/config_groups/a/weights/type", nullptr, "config_groups.a.weights.type is missing", ExitCode::data},
      {"/config_groups/a/weights/group_size", 16, "config_groups.a.weights.group_size = 16"},
      {"/config_groups/a/weights/strategy", "tensor_group", "config_groups.a.weights.strategy = "},
      {"/config_groups/a/weights/block_structure", {128, 128}, "config_groups.a.weights.block_structure = [128,128]"},
      {"/config_groups/a/weights/scale_dtype", "torch.float8_e4m3fn", "config_groups.a.weights.scale_dtype = "},
      {"/config_groups/a/input_activations/num_bits", 4, "config_groups.a.input_activations.num_bits = 4"},
      {"/config_groups/a/input_activations/dynamic", nullptr, "config_groups.a.input_activations.dynamic is missing", ExitCode::data},
      {"/config_groups/a/input_activations/dynamic", "local", "config_groups.a.input_activations.dynamic = "},
      {"/config_groups/a/input_activations/mystery", 1, "config_groups.a.input_activations.mystery = 1"}};
  for (const Wrong& wrong : wrongs) {
    json config = good;
    config[json::json_pointer(wrong.pointer)] = wrong.value;
    const Error error = packed_error(config);
    EXPECT_EQ(error.code(), wrong.code) << wrong.pointer;
    EXPECT_THAT(error.what(), ::testing::AllOf(::testing::StartsWith("config.json: "), HasSubstr(wrong.what)));
  }
}

const json kMxfp8Config = {{"quant_method", "mxfp8"}, {"weight_block_size", {1, 32}}, {"scale_fmt", "ue8m0"}};

json with(json config, const json& change) {
  config.update(change);
  return config;
}

TEST(PackedConfigs, OtherConventionsHaveOneScheme) {
  EXPECT_EQ(packed({{"quant_method", "mxfp4"}}).scheme("x"), kMxfp4);
  EXPECT_EQ(packed(kMxfp8Config).scheme("x"), kMxfp8);
  EXPECT_EQ(packed(with(kMxfp8Config, {{"dequantize", false}})).scheme("x"), kMxfp8);
  EXPECT_EQ(packed({{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"group_size", 32}}).scheme("x"), kMxfp8);
  EXPECT_FALSE(packed({{"quant_method", "mxfp4"}}).names_modules());
  EXPECT_STREQ(packed_error(json::array()).what(), "config.json: quantization_config must be a JSON object");
  const std::vector<std::pair<json, const char*>> refusals = {
      {{{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}, "quant_method \"modelopt\": mantissa knows"},
      {{{"quant_method", "gptq"}}, "quant_method \"gptq\": mantissa knows"},
      {{{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"group_size", 16}}, "quantization_config.group_size = 16"},
      {{{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"kv_cache_quant_algo", "FP8"}}, "kv_cache_quant_algo = \"FP8\""},
      {with(kMxfp8Config, {{"weight_block_size", {128, 128}}}), "quantization_config.weight_block_size = [128,128]"},
      {with(kMxfp8Config, {{"weight_block_size", nullptr}}), "quantization_config.weight_block_size is missing"},
      {with(kMxfp8Config, {{"activation_scheme", "static"}}), "quantization_config.activation_scheme = \"static\""},
      {with(kMxfp8Config, {{"scale_fmt", "float"}}), "quantization_config.scale_fmt = \"float\""},
      {with(kMxfp8Config, {{"scale_fmt", nullptr}}), "quantization_config.scale_fmt is missing"},
      {with(kMxfp8Config, {{"dequantize", true}}), "quantization_config.dequantize = true"},
      {with(kMxfp8Config, {{"ignored_layers", {"a"}}, {"modules_to_not_convert", {"b"}}}), "quantization_config.ignored_layers = [\"a\"]"},
      {with(kMxfp8Config, {{"ignored_layers", {"*.gate"}}}), "config.json: quantization_config.ignored_layers: \"*.gate\" "},
      {{{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"ignore", {"lm[h]"}}}, "quantization_config.ignore: \"lm[h]\" has ["},
      {{{"quant_method", "mxfp4"}, {"dequantize", true}}, "quantization_config.dequantize = true"},
      {{{"quant_method", "mxfp4"}, {"mystery", 1}}, "quantization_config.mystery = 1"}};
  for (const auto& [config, what] : refusals) {
    EXPECT_EQ(packed_error(config).code(), ExitCode::usage);
    EXPECT_THAT(packed_error(config).what(), HasSubstr(what));
  }
}

const json kBlockFp8 = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};

TEST(PackedConfigs, BlockFp8HasBlocksOf128AndMayHaveExpertsInFourBits) {
  constexpr PackedScheme kTiles{.format = Format::e4m3, .inputs = true, .block = 128},
      kFour{.format = Format::e2m1, .inputs = true, .block = 128};
  const std::string expert = "model.layers.0.mlp.experts.3.up_proj", other = "model.layers.0.mlp.up_proj";
  const PackedConfig plain = packed(kBlockFp8);
  EXPECT_TRUE(plain.block_fp8());
  EXPECT_FALSE(plain.scales_of_inputs_are_powers());
  EXPECT_EQ(plain.scheme(expert), kTiles);
  EXPECT_EQ(form_of(kTiles), (Quantization{.format = Format::e4m3, .block_rows = 128, .block_cols = 128}));
  EXPECT_EQ(form_of(kFour), packed_form(Format::e2m1));
  EXPECT_EQ(form_of(kMxfp8), packed_form(Format::e4m3));
  const PackedConfig four = packed(with(kBlockFp8, {{"expert_dtype", "fp4"},
                                                    {"scale_fmt", "ue8m0"},
                                                    {"fmt", "e4m3"},
                                                    {"activation_scheme", "dynamic"},
                                                    {"modules_to_not_convert", {"lm_head", "model.layers.1"}}}));
  EXPECT_TRUE(four.scales_of_inputs_are_powers());
  EXPECT_EQ(four.scheme(expert), kFour);
  EXPECT_EQ(four.scheme(other), kTiles);
  EXPECT_EQ(four.scheme("lm_head"), std::nullopt);
  EXPECT_EQ(four.scheme("model.layers.1.mlp.experts.3.up_proj"), std::nullopt);
  EXPECT_EQ(four.ignored().size(), 1U);
  EXPECT_EQ(packed(with(kBlockFp8, {{"expert_dtype", "fp8"}})).scheme(expert), kTiles);
  EXPECT_EQ(packed(with(kBlockFp8, {{"ignored_layers", {"lm_head"}}})).scheme("lm_head"), std::nullopt);
  EXPECT_FALSE(packed(kMxfp8Config).block_fp8());
  const std::vector<std::pair<json, const char*>> refusals = {
      {{{"weight_block_size", nullptr}}, "quantization_config.weight_block_size is missing: a scale is then that of a whole tensor"},
      {{{"weight_block_size", {1, 32}}}, "quantization_config.weight_block_size = [1,32]"},
      {{{"weight_block_size", {128, 64}}}, "quantization_config.weight_block_size = [128,64]"},
      {{{"activation_scheme", "static"}}, "quantization_config.activation_scheme = \"static\""},
      {{{"fmt", "e5m2"}}, "quantization_config.fmt = \"e5m2\""},
      {{{"scale_fmt", "int"}}, "quantization_config.scale_fmt = \"int\""},
      {{{"expert_dtype", "int4"}}, "quantization_config.expert_dtype = \"int4\""},
      {{{"dequantize", true}}, "quantization_config.dequantize = true"},
      {{{"mystery", 1}}, "quantization_config.mystery = 1"}};
  for (const auto& [change, what] : refusals) {
    EXPECT_EQ(packed_error(with(kBlockFp8, change)).code(), ExitCode::usage) << what;
    EXPECT_THAT(packed_error(with(kBlockFp8, change)).what(), HasSubstr(what));
  }
}

// should_convert_module() of transformers 5.23 and fnmatch of Python answer so.
TEST(PackedConfigs, ListsOfOtherConventionsHaveTheirOwnRules) {
  const json modelopt = {{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}}, mxfp4 = {{"quant_method", "mxfp4"}};
  const auto listed = [](const json& config, const char* key, const char* name, const std::string& module) {
    return !packed(with(config, {{key, {name}}})).scheme(module).has_value();
  };
  for (const char* key : {"modules_to_not_convert", "ignored_layers"}) {
    const auto is = [&](const char* name, const std::string& module) { return listed(kMxfp8Config, key, name, module); };
    EXPECT_TRUE(is("model.layers.1", "model.layers.1.mlp.up_proj"));
    EXPECT_FALSE(is("model.layers.1", "model.layers.11.mlp.up_proj"));
    EXPECT_TRUE(is("model.layers.*", "model.layers.11.mlp.up_proj"));
    EXPECT_TRUE(is("model.layers.", "model.layers.11.mlp.up_proj"));
    EXPECT_FALSE(is("mlp.gate", "model.layers.1.mlp.gate_proj"));
    EXPECT_TRUE(is("_proj", "model.layers.1.mlp.gate_proj"));
    EXPECT_FALSE(is("up|gate", "model.layers.1.mlp.gate_proj"));
  }
  EXPECT_TRUE(listed(mxfp4, "modules_to_not_convert", "model.layers.*.mlp.experts", "model.layers.1.mlp.experts"));
  EXPECT_FALSE(listed(mxfp4, "modules_to_not_convert", "model.layers.*.mlp.router", "model.layers.1.mlp.experts"));
  for (const char* key : {"ignore", "exclude_modules"}) {
    const auto is = [&](const char* name, const std::string& module) { return listed(modelopt, key, name, module); };
    EXPECT_TRUE(is("model.layers.1.mlp.experts*", "model.layers.1.mlp.experts.7.up_proj"));
    EXPECT_FALSE(is("model.layers.1.mlp", "model.layers.1.mlp.up_proj"));
    EXPECT_TRUE(is("*.mlp.?p_proj", "model.layers.1.mlp.up_proj"));
    EXPECT_FALSE(is("model.layers.?.mlp*", "model.layers.11.mlp.up_proj"));
    EXPECT_FALSE(is("modelxlayers*", "model.layers"));
    EXPECT_FALSE(is("model.layers", "modelxlayers"));
  }
}

TEST(PackedConfigs, TheSideFileOfModelOptIsReadAsOne) {
  const json file = {
      {"producer", {{"name", "modelopt"}}},
      {"quantization", {{"quant_algo", "MXFP8"}, {"group_size", 32}, {"kv_cache_quant_algo", nullptr}, {"exclude_modules", {"lm_head"}}}}};
  const PackedConfig config = PackedConfig::of_modelopt(file.dump(), "side");
  EXPECT_EQ(config.scheme("lm_head"), std::nullopt);
  EXPECT_EQ(config.scheme("x"), kMxfp8);
  const auto error = [&](const json& change) {
    json other = file;
    other.merge_patch(change);
    return std::string(test::error_of([&] { PackedConfig::of_modelopt(other.dump(), "side"); }).what());
  };
  EXPECT_THAT(error({{"quantization", {{"kv_cache_quant_algo", "FP8"}}}}), HasSubstr("side: quantization.kv_cache_quant_algo = \"FP8\""));
  EXPECT_THAT(error({{"quantization", nullptr}}), HasSubstr("side: quantization is missing"));
  EXPECT_THAT(error({{"mystery", 1}}), HasSubstr("mystery = 1"));
}

}  // namespace mantissa::packing_test
