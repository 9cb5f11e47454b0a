#include "hf/packing.h"

#include <algorithm>
#include <set>

#include "hf/tile_scales.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

// Lists modules by name; experts of a layer, of which there may be thousands, by one expression.
std::vector<std::string> targets_of(const std::vector<std::string>& modules) {
  std::vector<std::string> targets;
  std::set<std::string> seen;
  for (const std::string& module : modules) {
    const size_t experts = module.find(kOfExperts);
    std::string target = module;
    if (experts != std::string::npos) {
      const std::string head = module.substr(0, experts), tail = module.substr(module.rfind('.') + 1);
      std::string escaped;
      for (const char c : head) escaped += c == '.' ? std::string("\\.") : std::string(1, c);
      target = "re:" + escaped + "\\.experts\\.\\d+\\." + tail + "$";
    }
    if (seen.insert(target).second) targets.push_back(target);
  }
  return targets;
}

// Lists modules without codes by name, for readers without "re:". All experts of a layer are one module to them and have one scheme.
// transformers takes names as expressions that end where a module does, ModelOpt as wildcards for the whole name: after_experts is what its
// lists have behind that module.
std::vector<std::string> names_not_packed(const PackedModules& modules, const char* after_experts = "") {
  constexpr std::string_view kExpertsModule = ".experts";
  std::vector<std::string> names;
  for (const auto& [module, scheme] : modules) {
    if (scheme) continue;
    const size_t experts = module.find(kOfExperts);
    std::string name = experts == std::string::npos ? module : module.substr(0, experts + kExpertsModule.size()) + after_experts;
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

Json compressed_tensors(const PackedModules& modules) {
  std::map<PackedScheme, std::vector<std::string>> schemes;
  std::vector<std::string> not_packed;
  for (const auto& [name, scheme] : modules) (scheme ? schemes[*scheme] : not_packed).push_back(name);
  const auto form = [](const PackedScheme& scheme) {
    return scheme.format == Format::e4m3    ? "mxfp8-quantized"
           : scheme.format == Format::nvfp4 ? "nvfp4-pack-quantized"
                                            : "mxfp4-pack-quantized";
  };
  const auto operand = [](Format format, bool dynamic) {
    const bool two_levels = format == Format::nvfp4;
    Json out = {{"num_bits", format == Format::e4m3 ? 8 : 4},
                {"type", "float"},
                {"strategy", two_levels ? "tensor_group" : "group"},
                {"group_size", packed_form(format).block_cols},
                {"symmetric", true},
                {"dynamic", two_levels && dynamic ? Json("local") : Json(dynamic)},
                {"scale_dtype", two_levels ? "torch.float8_e4m3fn" : "torch.uint8"}};
    if (two_levels) out.add("zp_dtype", "torch.float8_e4m3fn");
    return out;
  };
  Json groups = Json::Members();
  for (const auto& [scheme, names] : schemes) {
    Json group = {{"targets", schemes.size() == 1 ? std::vector<std::string>{"Linear"} : targets_of(names)},
                  {"format", form(scheme)},
                  {"weights", operand(scheme.format, false)}};
    if (scheme.inputs != Format::none) group.add("input_activations", operand(scheme.inputs, true));
    groups.add(text("group_", groups.size()), std::move(group));
  }
  return {{"quant_method", "compressed-tensors"}, {"format", schemes.size() == 1 ? form(schemes.begin()->first) : "mixed-precision"},
          {"quantization_status", "compressed"},  {"version", "0.12.0"},
          {"global_compression_ratio", nullptr},  {"kv_cache_scheme", nullptr},
          {"ignore", targets_of(not_packed)},     {"config_groups", std::move(groups)}};
}

Json block_fp8(const PackedModules& modules) {
  const std::pair<const std::string, std::optional<PackedScheme>>* first = nullptr;  // packed experts, which have one format
  for (const auto& module : modules) {
    if (!module.second || !is_routed_expert(module.first)) continue;
    if (first == nullptr) first = &module;
    require(module.second->format == first->second->format, ExitCode::usage, first->first, " is ", format_name(first->second->format),
            " and ", module.first, " is ", format_name(module.second->format),
            ", but the convention fp8 has one expert_dtype for all experts: give all experts one rule, or use the convention "
            "compressed-tensors");
  }
  Json config = {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"},
                 {"fmt", "e4m3"},         {"weight_block_size", {kTile, kTile}},
                 {"scale_fmt", "ue8m0"},  {"modules_to_not_convert", names_not_packed(modules)}};
  if (first != nullptr && first->second->format == Format::e2m1) config.add("expert_dtype", "fp4");
  return config;
}

struct ModelOptForm {
  const char* algorithm = "MXFP8";
  int64_t group_size = kPackedBlock;
};

// Throws unless all packed modules have the one scheme that a convention without targets has: E4M3 whose inputs servers quantize, or, of
// modelopt, NVFP4 with inputs in NVFP4 or in high precision.
ModelOptForm require_one_scheme(const PackedModules& modules, Convention convention) {
  const std::pair<const std::string, std::optional<PackedScheme>>* first = nullptr;
  for (const auto& module : modules) {
    const auto& [name, scheme] = module;
    if (!scheme) continue;
    if (first == nullptr) first = &module;
    const bool two_levels = scheme->format == Format::nvfp4;
    require(scheme->format == Format::e4m3 || (two_levels && convention == Convention::modelopt), ExitCode::usage, name, " is ",
            two_levels ? "NVFP4" : "E2M1", ", which the convention ", choice_name(convention),
            " does not have: use the convention compressed-tensors");
    require(scheme->inputs != Format::none || two_levels, ExitCode::usage, name,
            " reads its input in high precision, which the convention ", choice_name(convention),
            " does not have: use the convention compressed-tensors");
    require(*scheme == *first->second, ExitCode::usage, "the convention ", choice_name(convention), " has one scheme, and ", first->first,
            " and ", name, " have two: give both one recipe by precision.rules, or use the convention compressed-tensors");
  }
  if (first == nullptr || first->second->format != Format::nvfp4) return {};
  return {.algorithm = first->second->inputs == Format::none ? "W4A16_NVFP4" : "NVFP4", .group_size = first->second->block};
}

// 1e-4 / 448, which the kernels of DeepSeek have as the least scale of inputs, rounded up to a power of two.
constexpr ScaleRange kDeepSeekInputs{.least = 127 - 22, .most = 254};

}  // namespace

PackedScheme packed_scheme(Format format, Format inputs) {
  return {.format = format, .inputs = inputs, .block = packed_form(format).block_cols};
}

Quantization form_of(const PackedScheme& scheme) {
  Quantization how = packed_form(scheme.format);
  how.tensor_exponent = scheme.exponent;
  if (scheme.format == Format::e4m3) how.block_cols = scheme.block;
  if (how.block_cols == kTile) how.block_rows = kTile;
  return how;
}

bool as_servers_quantize(const Quantization& input, Format weight, int64_t block) {
  if (weight == Format::nvfp4 || input.format == Format::nvfp4) return weight == input.format && input.rule == ScaleRule::nearest;
  if (input.format == Format::e2m1) return weight == Format::e2m1 && input.rule == ScaleRule::flashinfer && block == kPackedBlock;
  const bool any_scale = input.range == ScaleRange{} || (block == kTile && input.range == kDeepSeekInputs);
  return input.format == Format::e4m3 && input.rule == ScaleRule::rceil && any_scale;
}

PackedNames packed_names(const std::string& weight, Format format, Convention convention, ExportFormat folder) {
  if (folder == ExportFormat::gguf) return {.codes = weight, .scales = weight + " (scales)"};
  if (folder == ExportFormat::mlx) return {.codes = weight, .scales = weight.substr(0, weight.rfind('.')) + ".scales"};
  if (!weight.ends_with(".weight")) return {.codes = weight + "_blocks", .scales = weight + "_scales"};
  if (convention == Convention::fp8) return {.codes = weight, .scales = weight + "_scale_inv"};
  if (format == Format::nvfp4) {
    const std::string module = weight.substr(0, weight.rfind('.'));
    const bool modelopt = convention == Convention::modelopt;
    return {.codes = modelopt ? weight : weight + "_packed",
            .scales = weight + "_scale",
            .tensor_scale = weight + (modelopt ? "_scale_2" : "_global_scale"),
            .input_scale = module + (modelopt ? ".input_scale" : ".input_global_scale")};
  }
  return {.codes = format == Format::e2m1 ? weight + "_packed" : weight,
          .scales = weight + (convention == Convention::sglang ? "_scale_inv" : "_scale")};
}

std::string quantization_config(const PackedModules& modules, Convention convention) {
  if (convention == Convention::compressed_tensors) return compressed_tensors(modules).dump(-1, Json::Order::keys);
  if (convention == Convention::fp8) return block_fp8(modules).dump(-1, Json::Order::keys);
  const ModelOptForm form = require_one_scheme(modules, convention);
  if (convention == Convention::modelopt)
    return Json{{"quant_method", "modelopt"},
                {"quant_algo", form.algorithm},
                {"group_size", form.group_size},
                {"ignore", names_not_packed(modules, "*")},
                {"producer", {{"name", "mantissa"}}}}
        .dump(-1, Json::Order::keys);
  return Json{{"quant_method", "mxfp8"}, {"activation_scheme", "dynamic"},
              {"fmt", "e4m3"},           {"weight_block_size", {1, kPackedBlock}},
              {"scale_fmt", "ue8m0"},    {"modules_to_not_convert", names_not_packed(modules)}}
      .dump(-1, Json::Order::keys);
}

std::string modelopt_side_file(const PackedModules& modules) {
  const ModelOptForm form = require_one_scheme(modules, Convention::modelopt);
  const Json side = {{"producer", {{"name", "mantissa"}}},
                     {"quantization",
                      {{"quant_algo", form.algorithm},
                       {"group_size", form.group_size},
                       {"kv_cache_quant_algo", nullptr},
                       {"exclude_modules", names_not_packed(modules, "*")}}}};
  return side.dump(2, Json::Order::keys) + "\n";
}

}  // namespace mantissa
