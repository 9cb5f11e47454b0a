// quantization_config: its form for packed modules, and the scheme of a linear by the files that others wrote.
#include "hf/packing.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "architecture_configs.h"
#include "files.h"

namespace mantissa::packing_test {

using nlohmann::json;
using test::changed;
using test::error_of;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr PackedScheme kMxfp8{.format = Format::e4m3, .inputs = Format::e4m3}, kMxfp8Weights{.format = Format::e4m3},
    kMxfp4{.format = Format::e2m1}, kMxfp4Inputs{.format = Format::e2m1, .inputs = Format::e2m1},
    kTiles{.format = Format::e4m3, .inputs = Format::e4m3, .block = 128},
    kFour{.format = Format::e2m1, .inputs = Format::e4m3, .block = 128}, kNvfp4{.format = Format::nvfp4, .block = 16},
    kNvfp4Inputs{.format = Format::nvfp4, .inputs = Format::nvfp4, .block = 16};

json operand(int bits, bool dynamic) {
  json out = json::parse(R"({"type": "float", "strategy": "group", "group_size": 32, "symmetric": true, "scale_dtype": "torch.uint8"})");
  out.update({{"num_bits", bits}, {"dynamic", dynamic}});
  return out;
}

TEST(Packing, OneSchemeIsThatOfAllLinearsButThoseThatAreIgnored) {
  const PackedModules modules = {{"lm_head", {}},
                                 {"model.layers.0.mlp.gate", {}},
                                 {"model.layers.0.mlp.gate_proj", kMxfp8},
                                 {"model.layers.1.mlp.experts.0.up_proj", {}},
                                 {"model.layers.1.mlp.experts.10.up_proj", {}}};
  const auto config = [&](Convention convention) { return json::parse(quantization_config(modules, convention)); };
  json expected = json::parse(R"({"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "quantization_status": "compressed",
      "version": "0.12.0", "global_compression_ratio": null, "kv_cache_scheme": null,
      "ignore": ["lm_head", "model.layers.0.mlp.gate", "re:model\\.layers\\.1\\.mlp\\.experts\\.\\d+\\.up_proj$"],
      "config_groups": {"group_0": {"targets": ["Linear"], "format": "mxfp8-quantized"}}})");
  expected["config_groups"]["group_0"].update({{"weights", operand(8, false)}, {"input_activations", operand(8, true)}});
  EXPECT_EQ(config(Convention::compressed_tensors), expected);
  EXPECT_EQ(config(Convention::sglang), json::parse(R"({"quant_method": "mxfp8", "activation_scheme": "dynamic", "fmt": "e4m3",
      "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
      "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts"]})"));
  EXPECT_EQ(config(Convention::modelopt), json::parse(R"({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32,
      "ignore": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts*"], "producer": {"name": "mantissa"}})"));
  EXPECT_EQ(json::parse(modelopt_side_file(modules)), json::parse(R"({"producer": {"name": "mantissa"}, "quantization":
      {"quant_algo": "MXFP8", "group_size": 32, "kv_cache_quant_algo": null,
       "exclude_modules": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts*"]}})"));
  EXPECT_EQ(json::parse(kMxfp4Config), json::parse(R"({"quant_method": "mxfp4", "modules_to_not_convert":
      ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]})"));
}

// The groups of llm-compressor's presets NVFP4A16 and NVFP4, and what ModelOpt calls them.
TEST(Packing, Nvfp4IsTheSchemeOfBothConventions) {
  const json weights = json::parse(R"({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": true,
      "dynamic": false, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"})");
  for (const PackedScheme& scheme : {kNvfp4, kNvfp4Inputs}) {
    const bool inputs = scheme.inputs != Format::none;
    const PackedModules modules = {{"lm_head", {}}, {"model.layers.0.mlp.up_proj", scheme}};
    const json compressed = json::parse(quantization_config(modules, Convention::compressed_tensors));
    json group = {{"targets", {"Linear"}}, {"format", "nvfp4-pack-quantized"}, {"weights", weights}};
    if (inputs) group["input_activations"] = changed(weights, {{"dynamic", "local"}});
    EXPECT_EQ(compressed["config_groups"]["group_0"], group);
    EXPECT_EQ(compressed["format"], "nvfp4-pack-quantized");
    const json modelopt = json::parse(quantization_config(modules, Convention::modelopt)),
               side = json::parse(modelopt_side_file(modules))["quantization"];
    for (const json& one : {modelopt, side}) {
      EXPECT_EQ(one["quant_algo"], inputs ? "NVFP4" : "W4A16_NVFP4");
      EXPECT_EQ(one["group_size"], 16);
    }
    for (const json& one : {compressed, modelopt}) {
      const PackedConfig read(one.dump(), "config.json");
      EXPECT_EQ(read.scheme("model.layers.0.mlp.up_proj"), scheme);
      EXPECT_EQ(read.scheme("lm_head"), std::nullopt);
    }
    EXPECT_THAT(error_of([&] { quantization_config(modules, Convention::sglang); }).what(), HasSubstr("up_proj is NVFP4"));
  }
  const PackedModules two = {{"model.layers.0.mlp.up_proj", kNvfp4}, {"model.layers.1.mlp.up_proj", kNvfp4Inputs}};
  EXPECT_THAT(error_of([&] { quantization_config(two, Convention::modelopt); }).what(),
              HasSubstr("has one scheme, and model.layers.0.mlp.up_proj and model.layers.1.mlp.up_proj have two"));
  EXPECT_TRUE(as_servers_quantize(packed_form(Format::nvfp4), Format::nvfp4));
  EXPECT_FALSE(as_servers_quantize(packed_form(Format::nvfp4), Format::e2m1));
  EXPECT_FALSE(as_servers_quantize(packed_form(Format::e4m3), Format::nvfp4));
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
    EXPECT_THAT(error_of([&] { quantization_config(modules, convention); }).what(), HasSubstr("experts.0.up_proj is E2M1"));
    EXPECT_THAT(error_of([&] {
                  quantization_config({{"model.layers.0.mlp.up_proj", kMxfp8Weights}}, convention);
                }).what(),
                HasSubstr("up_proj reads its input in high precision"));
  }
}

// The form is that of DeepSeek-V3 and -V4, and of Qwen3-FP8.
TEST(Packing, BlockFp8IsOneConfigOfAllLinearsAndSaysWhatExpertsAre) {
  PackedModules modules = {{"lm_head", {}}, {"model.layers.0.mlp.experts.0.up_proj", kMxfp8}, {"model.layers.0.self_attn.q_proj", kMxfp8}};
  json expected = json::parse(R"({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
      "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]})");
  EXPECT_EQ(json::parse(quantization_config(modules, Convention::fp8)), expected);
  modules["model.layers.0.mlp.experts.0.up_proj"] = PackedScheme{.format = Format::e2m1, .inputs = Format::e4m3};
  expected["expert_dtype"] = "fp4";
  EXPECT_EQ(json::parse(quantization_config(modules, Convention::fp8)), expected);
  modules["model.layers.1.mlp.experts.0.up_proj"] = kMxfp8;
  const Error error = error_of([&] { quantization_config(modules, Convention::fp8); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("model.layers.0.mlp.experts.0.up_proj is e2m1 and model.layers.1.mlp.experts.0.up_proj is e4m3"));
}

TEST(Packing, ServersOfBlockFp8MayHaveALeastScaleOfInputs) {
  Quantization any{.format = Format::e4m3, .block_cols = 128}, least = any, less = any;
  least.range = {.least = 105, .most = 254};
  less.range = {.least = 104, .most = 254};
  for (const int64_t block : {32, 128}) {
    EXPECT_TRUE(as_servers_quantize(any, Format::e4m3, block));
    EXPECT_EQ(as_servers_quantize(least, Format::e4m3, block), block == 128);
    EXPECT_FALSE(as_servers_quantize(less, Format::e4m3, block));
    EXPECT_FALSE(as_servers_quantize({.format = Format::e5m2}, Format::e4m3, block));
    EXPECT_FALSE(as_servers_quantize({.format = Format::e4m3, .rule = ScaleRule::floor}, Format::e4m3, block));
  }
  EXPECT_EQ(form_of(kTiles), (Quantization{.format = Format::e4m3, .block_rows = 128, .block_cols = 128}));
  EXPECT_EQ(form_of(kFour), packed_form(Format::e2m1));
  EXPECT_EQ(form_of(kMxfp8), packed_form(Format::e4m3));
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
  EXPECT_EQ(names("a.weight", Format::nvfp4, Convention::compressed_tensors), "a.weight_packed a.weight_scale");
  EXPECT_EQ(names("a.weight", Format::nvfp4, Convention::modelopt), "a.weight a.weight_scale");
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
  return error_of([&] { packed(config); });
}

// The order is that of match_targets() of compressed-tensors 0.20, whatever the order of the groups.
TEST(PackedConfigs, ANameGoesBeforeExpressionsAndThoseBeforeTheClass) {
  const std::string module = "model.layers.0.mlp.down_proj";
  const json by_class = group({"Linear"}, 8, true), by_expression = group({"re:.*down_proj"}, 8, false),
             by_name = group({module}, 4, false);
  for (const json& groups :
       {json{{"a", by_class}, {"b", by_expression}, {"c", by_name}}, json{{"a", by_name}, {"b", by_expression}, {"c", by_class}}}) {
    const PackedConfig config = packed(quantization(groups));
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

// Expressions begin with the name and need not end with it. An entry of "ignore" takes a scheme away.
TEST(PackedConfigs, ExpressionsAreThoseOfPython) {
  struct Match {
    const char *target, *module;
    bool matches;
  };
  for (const auto& [target, module, matches] : std::vector<Match>{{"re:model.layers", "model.layers.0.mlp.up_proj", true},
                                                                  {"re:mlp", "model.layers.0.mlp.up_proj", false},
                                                                  {"re:.*mlp\\.gate", "model.layers.0.mlp.gate_proj", true},
                                                                  {"re:.*mlp\\.gate$", "model.layers.0.mlp.gate_proj", false},
                                                                  {"re:lm_head|model.*", "model.layers.0.mlp.gate_proj", true},
                                                                  {"model.layers", "model.layers.0.mlp.up_proj", false},
                                                                  {"lm_head", "lm_heads", false}}) {
    EXPECT_EQ(packed(quantization({{"a", group({target}, 8, true)}})).scheme(module).has_value(), matches) << target;
    EXPECT_EQ(packed(quantization({{"a", group({"Linear"}, 8, true)}}, {target})).scheme(module).has_value(), !matches) << target;
  }
  const json both = {{"a", group({"Linear", "model.up_proj"}, 8, true)}};
  EXPECT_EQ(packed(quantization(both, {"re:.*up_proj"})).scheme("model.up_proj"), std::nullopt);
  EXPECT_EQ(packed(quantization(both, {"Linear"})).scheme("lm_head"), std::nullopt);
  EXPECT_EQ(packed(quantization(both, nullptr)).scheme("lm_head"), kMxfp8);
  for (const char* target : {"re:(", "re:a)|(b"}) {
    const Error error = packed_error(quantization({{"a", group({target}, 8, true)}}));
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(text("config.json: quantization_config.config_groups: \"", target, "\" ")));
  }
  const std::string steps = R"(re:(a*)*(a*)*(a*)*$)", module = std::string(40, 'a') + "b";  // too many
  const json plain = {{"a", group({"Linear"}, 8, true)}}, many = {{"a", group({steps}, 8, true)}};
  for (const bool ignored : {true, false}) {
    const PackedConfig config = packed(ignored ? quantization(plain, {steps}) : quantization(many));
    const Error error = error_of([&] { (void)config.scheme(module); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    const char* const key = ignored ? "ignore" : "config_groups";
    EXPECT_THAT(error.what(), HasSubstr(text("config.json: quantization_config.", key, ": \"", steps, "\" ")));
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

TEST(PackedConfigs, InputsOfMxfp4WeightsMayHaveFourBits) {
  const PackedModules modules = {{"lm_head", {}}, {"model.layers.0.mlp.up_proj", kMxfp4Inputs}};
  const json written = json::parse(quantization_config(modules, Convention::compressed_tensors));
  EXPECT_EQ(written["config_groups"]["group_0"]["input_activations"], operand(4, true));
  EXPECT_EQ(packed(written).scheme("model.layers.0.mlp.up_proj"), kMxfp4Inputs);
  for (const auto& [weights, inputs] : {std::pair{8, 4}, {4, 6}}) {
    json group = {{"targets", {"Linear"}}, {"weights", operand(weights, false)}, {"input_activations", operand(inputs, true)}};
    EXPECT_THAT(packed_error(quantization({{"a", group}})).what(), HasSubstr("a.input_activations.num_bits"));
  }
  const Quantization how{Format::e2m1, 1, 32, ScaleRule::flashinfer};
  EXPECT_TRUE(as_servers_quantize(how, Format::e2m1));
  EXPECT_FALSE(as_servers_quantize(how, Format::e4m3));
  EXPECT_FALSE(as_servers_quantize({Format::e2m1, 1, 32, ScaleRule::floor}, Format::e2m1));
}

const json kMxfp8Config = json::parse(R"({"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"})"),
           kBlockFp8 = json::parse(R"({"quant_method": "fp8", "weight_block_size": [128, 128]})"),
           kModelOpt = json::parse(R"({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32})"),
           kGptOss = json::parse(R"({"quant_method": "mxfp4"})");

// Each of these values, by JSON pointer, is refused alone, with a message that begins with its key and continues so; "%V" stands for the
// value.
void expect_each_refused(const json& good, const char* values, const std::string& how = "%V", ExitCode code = ExitCode::usage) {
  const json all = json::parse(values);
  for (const auto& [pointer, value] : all.items()) {
    json config = good;
    config[json::json_pointer(pointer)] = value;
    const Error error = packed_error(config);
    std::string key = "quantization_config" + pointer;
    std::ranges::replace(key, '/', '.');
    key += how != "%V" ? how : value.is_object() ? " = " : " = " + value.dump();
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), AnyOf(StartsWith("config.json: " + key), HasSubstr("\n  " + key)));
  }
}

TEST(PackedConfigs, WhatIsNeutralIsTakenAndAllElseRefusedByName) {
  const json good = quantization({{"a", group({"Linear"}, 8, true)}});
  json neutral = good;
  neutral.update({{"version", "0.20.0"}, {"format", "mxfp8-quantized"}, {"kv_cache_scheme", nullptr}, {"sparsity_config", json::object()}});
  neutral["config_groups"]["a"].update({{"format", "mxfp8-quantized"}, {"output_activations", nullptr}});
  neutral["config_groups"]["a"]["weights"].update({{"observer", "minmax"}, {"block_structure", nullptr}, {"actorder", nullptr}});
  EXPECT_EQ(packed(neutral).scheme("x"), kMxfp8);
  EXPECT_EQ(packed(changed(kMxfp8Config, {{"dequantize", false}})).scheme("x"), kMxfp8);
  EXPECT_EQ(packed(kModelOpt).scheme("x"), kMxfp8);
  EXPECT_EQ(packed(kGptOss).scheme("x"), kMxfp4);
  EXPECT_FALSE(packed(kGptOss).names_modules());
  EXPECT_STREQ(packed_error(json::array()).what(), "config.json: quantization_config must be a JSON object");
  expect_each_refused(good, R"({"/kv_cache_scheme": {"num_bits": 8}, "/transform_config": {"config_groups": 1}, "/mystery": 1,
      "/quantization_status": "frozen", "/format": "float-quantized",
      "/config_groups/a/mystery": 1, "/config_groups/a/output_activations": 1, "/config_groups/a/format": "mxfp4-pack-quantized",
      "/config_groups/a/weights/mystery": 1, "/config_groups/a/weights/dynamic": true, "/config_groups/a/weights/symmetric": false,
      "/config_groups/a/weights/num_bits": 6, "/config_groups/a/weights/type": "int", "/config_groups/a/weights/group_size": 16,
      "/config_groups/a/weights/strategy": "tensor_group", "/config_groups/a/weights/block_structure": [128, 128],
      "/config_groups/a/weights/scale_dtype": "torch.float8_e4m3fn", "/config_groups/a/input_activations/num_bits": 4,
      "/config_groups/a/input_activations/dynamic": "local", "/config_groups/a/input_activations/mystery": 1})");
  expect_each_refused(good, R"({"/config_groups": null, "/config_groups/a/targets": null, "/config_groups/a/weights": null,
      "/config_groups/a/weights/type": null, "/config_groups/a/input_activations/dynamic": null})",
                      " is missing", ExitCode::data);
  expect_each_refused(good, R"({"/config_groups/a/targets": [1], "/ignore": "lm_head"})", " must be a list of names", ExitCode::data);
  expect_each_refused(good, R"({"/config_groups/a": ["Linear"]})", " is the name of a scheme");
  expect_each_refused(kMxfp8Config, R"({"/quant_method": "gptq"})", " \"gptq\": mantissa knows");
  expect_each_refused(kMxfp8Config, R"({"/weight_block_size": [128, 128], "/activation_scheme": "static", "/scale_fmt": "float",
      "/dequantize": true})");
  expect_each_refused(kMxfp8Config, R"({"/weight_block_size": null, "/scale_fmt": null})", " is missing");
  expect_each_refused(kMxfp8Config, R"({"/ignored_layers": ["*.gate"]})", ": \"*.gate\" ");
  expect_each_refused(changed(kMxfp8Config, {{"modules_to_not_convert", {"b"}}}), R"({"/ignored_layers": ["a"]})");
  EXPECT_THAT(packed_error(changed(kModelOpt, {{"quant_algo", "NVFP4_AWQ"}})).what(),
              HasSubstr("quant_method \"modelopt\": mantissa knows"));
  expect_each_refused(kModelOpt, R"({"/group_size": 16, "/kv_cache_quant_algo": "FP8"})");
  const json four = changed(kModelOpt, {{"quant_algo", "NVFP4"}, {"group_size", 16}, {"config_groups", json::object()}});
  EXPECT_EQ(packed(four).scheme("x"), kNvfp4Inputs);
  expect_each_refused(four, R"({"/group_size": 32, "/kv_cache_scheme": {"num_bits": 8}})");
  json two_levels = quantization({{"a", group({"Linear"}, 4, false)}});
  two_levels["config_groups"]["a"]["weights"].update({{"strategy", "tensor_group"}, {"group_size", 16}});
  two_levels["config_groups"]["a"]["weights"].erase("scale_dtype");
  EXPECT_EQ(packed(two_levels).scheme("x"), kNvfp4);
  expect_each_refused(two_levels, R"({"/config_groups/a/weights/group_size": 32, "/config_groups/a/weights/scale_dtype": "torch.uint8",
      "/config_groups/a/weights/dynamic": "local", "/config_groups/a/format": "mxfp4-pack-quantized"})");
  two_levels["config_groups"]["a"]["input_activations"] = two_levels["config_groups"]["a"]["weights"];
  expect_each_refused(two_levels, R"({"/config_groups/a/input_activations/dynamic": false})");
  two_levels["config_groups"]["a"]["input_activations"] = operand(8, true);
  EXPECT_THAT(packed_error(two_levels).what(), HasSubstr("a.input_activations.num_bits"));
  expect_each_refused(kModelOpt, R"({"/ignore": ["lm[h]"]})", ": \"lm[h]\" has [");
  expect_each_refused(kGptOss, R"({"/dequantize": true, "/mystery": 1})");
  expect_each_refused(kBlockFp8, R"({"/weight_block_size": null})", " is missing: a scale is then that of a whole tensor");
  expect_each_refused(kBlockFp8, R"({"/weight_block_size": [1, 32], "/activation_scheme": "static", "/fmt": "e5m2", "/scale_fmt": "int",
      "/expert_dtype": "int4", "/dequantize": true, "/mystery": 1})");
  expect_each_refused(kBlockFp8, R"({"/weight_block_size": [128, 64]})");
}

TEST(PackedConfigs, BlockFp8HasBlocksOf128AndMayHaveExpertsInFourBits) {
  const std::string expert = "model.layers.0.mlp.experts.3.up_proj";
  const PackedConfig plain = packed(kBlockFp8);
  EXPECT_TRUE(plain.block_fp8());
  EXPECT_FALSE(packed(kMxfp8Config).block_fp8());
  EXPECT_FALSE(plain.scales_of_inputs_are_powers());
  EXPECT_EQ(plain.scheme(expert), kTiles);
  EXPECT_EQ(packed(changed(kBlockFp8, {{"expert_dtype", "fp8"}})).scheme(expert), kTiles);
  EXPECT_EQ(packed(changed(kBlockFp8, {{"ignored_layers", {"lm_head"}}})).scheme("lm_head"), std::nullopt);
  const PackedConfig four = packed(changed(kBlockFp8, json::parse(R"({"expert_dtype": "fp4", "scale_fmt": "ue8m0", "fmt": "e4m3",
      "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", "model.layers.1"]})")));
  EXPECT_TRUE(four.scales_of_inputs_are_powers());
  EXPECT_EQ(four.scheme(expert), kFour);
  EXPECT_EQ(four.scheme("model.layers.0.mlp.up_proj"), kTiles);
  EXPECT_EQ(four.scheme("lm_head"), std::nullopt);
  EXPECT_EQ(four.scheme("model.layers.1.mlp.experts.3.up_proj"), std::nullopt);
  EXPECT_EQ(four.ignored().size(), 1U);
}

// should_convert_module() of transformers 5.23 and fnmatch of Python answer so.
TEST(PackedConfigs, ListsOfOtherConventionsHaveTheirOwnRules) {
  struct Listed {
    const char *name, *module;
    bool listed;
  };
  const auto expect_listed = [](const json& config, const char* key, const std::vector<Listed>& names) {
    for (const auto& [name, module, listed] : names)
      EXPECT_EQ(packed(changed(config, {{key, {name}}})).scheme(module), listed ? std::nullopt : packed(config).scheme(module))
          << key << ' ' << name << ' ' << module;
  };
  for (const char* key : {"modules_to_not_convert", "ignored_layers"})
    expect_listed(kMxfp8Config, key,
                  {{"model.layers.1", "model.layers.1.mlp.up_proj", true},
                   {"model.layers.1", "model.layers.11.mlp.up_proj", false},
                   {"model.layers.*", "model.layers.11.mlp.up_proj", true},
                   {"model.layers.", "model.layers.11.mlp.up_proj", true},
                   {"mlp.gate", "model.layers.1.mlp.gate_proj", false},
                   {"_proj", "model.layers.1.mlp.gate_proj", true},
                   {"up|gate", "model.layers.1.mlp.gate_proj", false}});
  expect_listed(kGptOss, "modules_to_not_convert",
                {{"model.layers.*.mlp.experts", "model.layers.1.mlp.experts", true},
                 {"model.layers.*.mlp.router", "model.layers.1.mlp.experts", false}});
  for (const char* key : {"ignore", "exclude_modules"})
    expect_listed(kModelOpt, key,
                  {{"model.layers.1.mlp.experts*", "model.layers.1.mlp.experts.7.up_proj", true},
                   {"model.layers.1.mlp", "model.layers.1.mlp.up_proj", false},
                   {"*.mlp.?p_proj", "model.layers.1.mlp.up_proj", true},
                   {"model.layers.?.mlp*", "model.layers.11.mlp.up_proj", false},
                   {"modelxlayers*", "model.layers", false},
                   {"model.layers", "modelxlayers", false}});
}

TEST(PackedConfigs, TheSideFileOfModelOptIsReadAsOne) {
  const json file = json::parse(R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8", "group_size": 32,
      "kv_cache_quant_algo": null, "exclude_modules": ["lm_head"]}})");
  const PackedConfig config = PackedConfig::of_modelopt(file.dump(), "side");
  EXPECT_EQ(config.scheme("lm_head"), std::nullopt);
  EXPECT_EQ(config.scheme("x"), kMxfp8);
  const std::vector<std::pair<const char*, const char*>> refusals = {
      {R"({"quantization": {"kv_cache_quant_algo": "FP8"}})", "side: quantization.kv_cache_quant_algo = \"FP8\""},
      {R"({"quantization": null})", "side: quantization is missing"},
      {R"({"mystery": 1})", "mystery = 1"}};
  for (const auto& [change, what] : refusals) {
    json other = file;
    other.merge_patch(json::parse(change));
    EXPECT_THAT(error_of([&] { PackedConfig::of_modelopt(other.dump(), "side"); }).what(), HasSubstr(what));
  }
}

}  // namespace mantissa::packing_test
