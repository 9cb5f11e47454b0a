#include <algorithm>
#include <nlohmann/json.hpp>

#include "mantissa/base/json.h"
#include "mantissa/base/text.h"
#include "mantissa/models/packing.h"
#include "models/family_keys.h"

namespace mantissa {
namespace {

using nlohmann::json;

constexpr std::string_view kExpression = "re:";
// What torch calls all linears of these families, and what these are made of.
constexpr std::array kClasses = {"Linear", "Module"};

// Python's re.match: from the start of the name, and not to its end unless the expression says so.
Pattern expression_of(const std::string& written, const std::string& where) {
  const std::string expression = written.substr(kExpression.size());
  try {
    Pattern(text(kExpression, expression), 1);  // alone, so that no bracket of it closes those around it
    return Pattern(text(kExpression, "(?:", expression, ").*"), 1);
  } catch (const Error& error) {
    fail(error.code(), where, ": \"", shortened(written), "\" ", error.what());
  }
}

std::vector<std::string> names_of(FamilyKeys& keys, const std::string& key) {
  std::vector<std::string> names;
  if (!keys.has(key)) return names;
  if (!keys.value(key).is_array()) keys.wrong(key, "a list of names");
  for (const json& name : keys.value(key)) {
    if (!name.is_string()) keys.wrong(key, "a list of names");
    names.push_back(name.get<std::string>());
  }
  return names;
}

// Weights or inputs of a group: floating point in blocks of 32 with scales of powers of two. What says how scales were found is neutral.
int64_t read_operand(FamilyKeys& keys, bool made_as_they_come) {
  keys.ignore({"observer", "observer_kwargs", "zp_dtype"});
  for (const char* const name : {"type", "group_size", "scale_dtype"}) keys.require_present(name);
  keys.only("type", {"float"});
  keys.only("group_size", {kPackedBlock});
  keys.only("scale_dtype", {"torch.uint8"});
  keys.only("strategy", {"group"});
  keys.only("symmetric", {true});
  keys.only("block_structure", {});
  keys.only("actorder", {false, "weight", "static"});
  if (made_as_they_come) keys.require_present("dynamic");
  keys.only("dynamic", {made_as_they_come});
  const int64_t bits = keys.integer_or("num_bits", 8);
  keys.require_all_known();
  return bits;
}

PackedScheme read_group(const json& group, const std::string& source, const std::string& where) {
  FamilyKeys keys(group, source, where);
  keys.ignore({"targets"});
  keys.require_present("weights");
  FamilyKeys weights(keys.value("weights"), source, where + "weights.");
  const int64_t bits = read_operand(weights, false);
  if (bits != 8 && bits != 4) weights.refuse("num_bits", "mantissa reads MXFP8 and MXFP4");
  keys.only("format", {bits == 8 ? "mxfp8-quantized" : "mxfp4-pack-quantized"});
  keys.only("output_activations", {});
  PackedScheme scheme{.format = bits == 8 ? Format::e4m3 : Format::e2m1, .inputs = keys.has("input_activations")};
  if (scheme.inputs) {
    FamilyKeys inputs(keys.value("input_activations"), source, where + "input_activations.");
    if (read_operand(inputs, true) != 8) inputs.refuse("num_bits", "mantissa quantises inputs to MXFP8");
  }
  keys.require_all_known();
  return scheme;
}

// Targets of all groups with their schemes. What two groups name is the later one's.
std::map<std::string, PackedScheme> read_groups(FamilyKeys& keys, const std::string& source) {
  keys.require_present("config_groups");
  const json& groups = keys.value("config_groups");
  if (!groups.is_object()) keys.wrong("config_groups", "an object");
  std::map<std::string, PackedScheme> targets;
  for (const auto& [name, group] : groups.items()) {
    const std::string where = "quantization_config.config_groups." + name;
    require(!group.is_array(), ExitCode::usage, source, ": ", where, " is the name of a scheme: write the scheme out");
    const PackedScheme scheme = read_group(group, source, where + ".");
    FamilyKeys of_group(group, source, where + ".");
    of_group.require_present("targets");
    for (const std::string& target : names_of(of_group, "targets")) targets[target] = scheme;
  }
  return targets;
}

// Beside config_groups and ignore.
void read_compressed_tensors(FamilyKeys& keys) {
  keys.ignore({"quant_method", "version", "global_compression_ratio", "run_compressed"});
  keys.only("format", {"mxfp8-quantized", "mxfp4-pack-quantized", "mixed-precision"});
  keys.only("quantization_status", {"compressed"});
  keys.only("kv_cache_scheme", {});
  for (const char* const name : {"sparsity_config", "transform_config"}) keys.only(name, {json::object()});
  keys.only("moe_sparsity_config", {});
}

PackedScheme read_one_scheme(FamilyKeys& keys, const std::string& method, const std::string& source) {
  keys.ignore({"quant_method"});
  if (method == "mxfp4") {  // experts of gpt-oss, whose inputs stay in high precision
    keys.ignore({"modules_to_not_convert", "dequantize"});
    return {.format = Format::e2m1, .inputs = false};
  }
  if (method == "mxfp8") {
    keys.only("activation_scheme", {"dynamic"});
    keys.only("fmt", {"e4m3"});
    keys.only("scale_fmt", {"ue8m0"});
    keys.only("weight_block_size", {json::array({1, kPackedBlock})});
    keys.ignore({"modules_to_not_convert", "ignored_layers", "dequantize"});
    return {.format = Format::e4m3, .inputs = true};
  }
  require(method == "modelopt" && keys.word("quant_algo", "") == "MXFP8", ExitCode::usage, source, ": quantization_config.quant_method \"",
          shortened(method), "\": mantissa knows compressed-tensors in MXFP8 and MXFP4, mxfp8, mxfp4, and modelopt with quant_algo MXFP8");
  keys.only("group_size", {kPackedBlock});
  for (const char* const name : {"kv_cache_quant_algo", "kv_cache_scheme"}) keys.only(name, {});
  keys.ignore({"ignore", "exclude_modules", "producer"});
  return {.format = Format::e4m3, .inputs = true};
}

}  // namespace

PackedConfig::PackedConfig(std::string_view content, const std::string& source) {
  const json config = parse_strict_json(content, source);
  FamilyKeys keys(config, source, "quantization_config.");
  const std::string method = keys.word("quant_method", "");
  if (method != "compressed-tensors") {
    one_ = read_one_scheme(keys, method, source);
    keys.require_all_known();
    return;
  }
  read_compressed_tensors(keys);
  for (const auto& [target, scheme] : read_groups(keys, source)) {
    if (target.starts_with(kExpression))
      expressions_.emplace_back(expression_of(target, source + ": quantization_config.config_groups"), scheme);
    else
      targets_[target] = scheme;
  }
  for (const std::string& name : names_of(keys, "ignore")) {
    if (name.starts_with(kExpression))
      ignored_expressions_.push_back(expression_of(name, source + ": quantization_config.ignore"));
    else
      ignored_.insert(name);
  }
  keys.require_all_known();
}

// As match_targets() of compressed-tensors has it: a name before expressions, these by alphabet, and a class last.
std::optional<PackedScheme> PackedConfig::scheme(const std::string& module) const {
  if (one_) return one_;
  const bool ignored = ignored_.contains(module) ||
                       std::ranges::any_of(kClasses, [&](const char* name) { return ignored_.contains(name); }) ||
                       std::ranges::any_of(ignored_expressions_, [&](const Pattern& one) { return one.matches(module); });
  if (ignored) return {};
  if (const auto named = targets_.find(module); named != targets_.end()) return named->second;
  for (const auto& [pattern, scheme] : expressions_) {
    if (pattern.matches(module)) return scheme;
  }
  for (const char* const name : kClasses) {
    if (const auto of_class = targets_.find(name); of_class != targets_.end()) return of_class->second;
  }
  return {};
}

}  // namespace mantissa
