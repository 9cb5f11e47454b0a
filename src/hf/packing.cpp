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
  const auto form = [](const PackedScheme& scheme) { return scheme.format == Format::e4m3 ? "mxfp8-quantized" : "mxfp4-pack-quantized"; };
  const auto operand = [](int bits, bool dynamic) {
    return Json{{"num_bits", bits},  {"type", "float"},    {"strategy", "group"},         {"group_size", kPackedBlock},
                {"symmetric", true}, {"dynamic", dynamic}, {"scale_dtype", "torch.uint8"}};
  };
  Json groups = Json::Members();
  for (const auto& [scheme, names] : schemes) {
    const int bits = scheme.format == Format::e4m3 ? 8 : 4;
    Json group = {{"targets", schemes.size() == 1 ? std::vector<std::string>{"Linear"} : targets_of(names)},
                  {"format", form(scheme)},
                  {"weights", operand(bits, false)}};
    if (scheme.inputs != Format::none) group.add("input_activations", operand(scheme.inputs == Format::e2m1 ? 4 : 8, true));
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

// 1e-4 / 448, which the kernels of DeepSeek have as the least scale of inputs, rounded up to a power of two.
constexpr ScaleRange kDeepSeekInputs{.least = 127 - 22, .most = 254};

}  // namespace

Quantization form_of(const PackedScheme& scheme) {
  Quantization how = packed_form(scheme.format);
  if (scheme.format == Format::e4m3) how.block_cols = scheme.block;
  if (how.block_cols == kTile) how.block_rows = kTile;
  return how;
}

bool as_servers_quantize(const Quantization& input, Format weight, int64_t block) {
  if (input.format == Format::e2m1) return weight == Format::e2m1 && input.rule == ScaleRule::flashinfer && block == kPackedBlock;
  const bool any_scale = input.range == ScaleRange{} || (block == kTile && input.range == kDeepSeekInputs);
  return input.format == Format::e4m3 && input.rule == ScaleRule::rceil && any_scale;
}

PackedNames packed_names(const std::string& weight, Format format, Convention convention, ExportFormat folder) {
  if (folder == ExportFormat::gguf) return {.codes = weight, .scales = weight + " (scales)"};
  if (folder == ExportFormat::mlx) return {.codes = weight, .scales = weight.substr(0, weight.rfind('.')) + ".scales"};
  if (!weight.ends_with(".weight")) return {.codes = weight + "_blocks", .scales = weight + "_scales"};
  if (convention == Convention::fp8) return {.codes = weight, .scales = weight + "_scale_inv"};
  return {.codes = format == Format::e2m1 ? weight + "_packed" : weight,
          .scales = weight + (convention == Convention::sglang ? "_scale_inv" : "_scale")};
}

std::string quantization_config(const PackedModules& modules, Convention convention) {
  if (convention == Convention::compressed_tensors) return compressed_tensors(modules).dump(-1, Json::Order::keys);
  if (convention == Convention::fp8) return block_fp8(modules).dump(-1, Json::Order::keys);
  for (const auto& [name, scheme] : modules) {  // all have E4M3 with inputs quantized by the server, the only scheme of these conventions
    if (!scheme) continue;
    require(scheme->format == Format::e4m3, ExitCode::usage, name, " is E2M1, which the convention ", choice_name(convention),
            " does not have: use the convention compressed-tensors");
    require(scheme->inputs != Format::none, ExitCode::usage, name, " reads its input in high precision, which the convention ",
            choice_name(convention), " does not have: use the convention compressed-tensors");
  }
  if (convention == Convention::modelopt)
    return Json{{"quant_method", "modelopt"},
                {"quant_algo", "MXFP8"},
                {"group_size", kPackedBlock},
                {"ignore", names_not_packed(modules, "*")},
                {"producer", {{"name", "mantissa"}}}}
        .dump(-1, Json::Order::keys);
  return Json{{"quant_method", "mxfp8"}, {"activation_scheme", "dynamic"},
              {"fmt", "e4m3"},           {"weight_block_size", {1, kPackedBlock}},
              {"scale_fmt", "ue8m0"},    {"modules_to_not_convert", names_not_packed(modules)}}
      .dump(-1, Json::Order::keys);
}

std::string modelopt_side_file(const PackedModules& modules) {
  const Json side = {{"producer", {{"name", "mantissa"}}},
                     {"quantization",
                      {{"quant_algo", "MXFP8"},
                       {"group_size", kPackedBlock},
                       {"kv_cache_quant_algo", nullptr},
                       {"exclude_modules", names_not_packed(modules, "*")}}}};
  return side.dump(2, Json::Order::keys) + "\n";
}

}  // namespace mantissa
