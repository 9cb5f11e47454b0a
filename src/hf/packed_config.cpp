#include <algorithm>
#include <array>

#include "hf/architecture_table.h"
#include "hf/packing.h"
#include "hf/tile_scales.h"
#include "mantissa/base/text.h"
#include "mantissa/json/json.h"

namespace mantissa {
namespace {

// Returns the names under which a server may ask for a linear.
std::vector<std::string> server_names(const std::string& linear) {
  if (const size_t experts = linear.find(kOfExperts); experts != std::string::npos)
    return {linear, linear.substr(0, experts + kOfExperts.size() - 1)};
  const size_t dot = linear.rfind('.') + 1;
  const std::string parent = linear.substr(0, dot), last = linear.substr(dot);
  if (last == "q_proj" || last == "k_proj" || last == "v_proj") return {linear, parent + "qkv_proj"};
  if (last == "gate_proj" || last == "up_proj") return {linear, parent + "gate_up_proj"};
  return {linear};
}

struct Reading {
  bool (*matches)(const std::string& entry, const std::string& name);
  const char* what;
};
// Readings, the strictest first: each takes at least what those before it take, except beginnings, which are no parts between dots.
constexpr std::array kReadings = {
    Reading{[](const std::string& entry, const std::string& name) { return name == entry; }, "whole names"},
    Reading{[](const std::string& entry, const std::string& name) {
              for (size_t at = name.find(entry); at != std::string::npos; at = name.find(entry, at + 1)) {
                const size_t end = at + entry.size();
                if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) return true;
              }
              return false;
            },
            "parts between dots"},
    Reading{[](const std::string& entry, const std::string& name) { return name.starts_with(entry); }, "beginnings of names"},
    Reading{[](const std::string& entry, const std::string& name) { return name.find(entry) != std::string::npos; }, "parts of names"}};

}  // namespace

std::vector<std::string> ignore_list_findings(const IgnoreList& list, const std::vector<FileLinear>& linears,
                                              const std::vector<std::string>& modules) {
  const auto takes = [](const Reading& reading, const std::string& entry, const std::string& linear) {
    return std::ranges::any_of(server_names(linear), [&](const std::string& name) { return reading.matches(entry, name); });
  };
  std::vector<std::string> findings;
  std::vector<std::string> plain;
  std::ranges::copy_if(list.entries, std::back_inserter(plain), [](const std::string& entry) {
    return !entry.starts_with("re:") && entry.find_first_of("*?") == std::string::npos;  // else an expression
  });
  for (const std::string& entry : plain) {
    for (size_t i = 0; i < kReadings.size(); ++i) {
      std::vector<std::string> found;  // codes that the entry names in this reading and in none before it
      for (const FileLinear& linear : linears) {
        const auto named = [&](const Reading& reading) { return takes(reading, entry, linear.name); };
        const bool before = std::any_of(kReadings.begin(), kReadings.begin() + i, named);
        if (linear.codes && !before && named(kReadings[i])) found.push_back(linear.name);
      }
      if (found.empty()) continue;
      findings.push_back(text(list.where, ": \"", entry, "\" also names, for a server that looks for ", kReadings[i].what,
                              ", what holds codes: ", joined(found)));
    }
    const bool known = std::ranges::any_of(modules, [&](const std::string& module) { return takes(kReadings.back(), entry, module); });
    if (!known) findings.push_back(text(list.where, ": \"", entry, "\" names nothing in the file"));
  }
  if (list.whole_names) return findings;
  std::vector<std::string> missed;
  for (const FileLinear& linear : linears) {
    const bool named = std::ranges::any_of(plain, [&](const std::string& entry) { return takes(kReadings.front(), entry, linear.name); });
    if (!linear.codes && !named) missed.push_back(linear.name);
  }
  if (!missed.empty())
    findings.push_back(text(list.where, ": for a server that looks for whole names no entry names what holds no codes: ", joined(missed)));
  return findings;
}

namespace {

// Reads how a file says that its linears are codes.

constexpr std::string_view kExpression = "re:";
// Class names that torch has for all linears of these architectures, and for their base.
constexpr std::array kClasses = {"Linear", "Module"};

// Adds the place of an expression to its errors.
template <class Body>
auto at_expression(const std::string& where, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    fail(error.code(), where, " ", error.what());
  }
}

// Matches as Python's re.match: from the start of the name, and to its end only if `after` says so.
Pattern expression_of(const std::string& expression, const std::string& after, const std::string& where) {
  return at_expression(where, [&] {
    Pattern(text(kExpression, expression), 1);  // alone, so that no bracket of it closes those around it
    return Pattern(text(kExpression, "(?:", expression, ")", after, ".*"), 1);
  });
}

std::vector<std::string> names_of(ArchitectureKeys& keys, const std::string& key) {
  std::vector<std::string> names;
  if (!keys.has(key)) return names;
  if (!keys.value(key).is_list()) keys.wrong(key, "a list of names");
  for (const Json& name : keys.value(key).entries()) {
    if (!name.is_string()) keys.wrong(key, "a list of names");
    names.push_back(name.string());
  }
  return names;
}

// Reads weights or inputs of a group: floating point in blocks of 32 with scales of powers of two, or NVFP4. Keys that say how scales were
// found do not matter. None: of other bits.
std::optional<Format> read_operand(ArchitectureKeys& keys, bool of_inputs) {
  keys.ignore({"observer", "observer_kwargs", "zp_dtype"});
  const int64_t bits = keys.integer_or("num_bits", 8);
  const bool two_levels = bits == 4 && keys.word("strategy", "group") == "tensor_group";
  for (const char* const name : {"type", "group_size"}) keys.require_present(name);
  keys.only("type", {"float"});
  keys.only("group_size", {packed_form(two_levels ? Format::nvfp4 : Format::e2m1).block_cols});
  if (two_levels) {  // earlier versions of llm-compressor did not name the type of scales
    keys.only("scale_dtype", {"torch.float8_e4m3fn"});
  } else {
    keys.require_present("scale_dtype");
    keys.only("scale_dtype", {"torch.uint8"});
    keys.only("strategy", {"group"});
  }
  keys.only("symmetric", {true});
  keys.only("block_structure", {});
  keys.only("actorder", {false, "weight", "static"});
  if (of_inputs) keys.require_present("dynamic");
  keys.only("dynamic", {of_inputs && two_levels ? Json("local") : Json(of_inputs)});
  keys.require_all_known();
  if (two_levels) return Format::nvfp4;
  return bits == 8 ? std::optional(Format::e4m3) : bits == 4 ? std::optional(Format::e2m1) : std::nullopt;
}

PackedScheme read_group(const Json& group, const std::string& source, const std::string& where) {
  ArchitectureKeys keys(group, source, where);
  keys.ignore({"targets"});
  keys.require_present("weights");
  ArchitectureKeys weights(keys.value("weights"), source, where + "weights.");
  const std::optional<Format> format = read_operand(weights, false);
  if (!format) weights.refuse("num_bits", "mantissa reads MXFP8, MXFP4 and NVFP4");
  keys.only("format", {*format == Format::e4m3    ? "mxfp8-quantized"
                       : *format == Format::nvfp4 ? "nvfp4-pack-quantized"
                                                  : "mxfp4-pack-quantized"});
  keys.only("output_activations", {});
  PackedScheme scheme = packed_scheme(*format);
  if (keys.has("input_activations")) {
    ArchitectureKeys inputs(keys.value("input_activations"), source, where + "input_activations.");
    const std::optional<Format> to = read_operand(inputs, true);
    const bool two_levels = *format == Format::nvfp4;
    if (two_levels ? to != Format::nvfp4 : to != Format::e4m3 && !(to == Format::e2m1 && *format == Format::e2m1))
      inputs.refuse("num_bits", two_levels ? "mantissa quantizes inputs of NVFP4 weights to NVFP4"
                                           : "mantissa quantizes inputs to MXFP8, and those of MXFP4 weights also to MXFP4");
    scheme.inputs = *to;
  }
  keys.require_all_known();
  return scheme;
}

}  // namespace

class PackedConfig::Keys : public ArchitectureKeys {
 public:
  Keys(const Json& object, const std::string& file, const std::string& at)
      : ArchitectureKeys(object, file, at + "."), source(file), key(at), where(file + ": " + at + ".") {}
  const std::string source, key, where;

  std::string where_of(const std::string& list, const std::string& name) const { return text(where, list, ": \"", shortened(name), "\""); }
  // The default of transformers is not MX.
  void require_said(const std::string& name, const char* otherwise) {
    require(has(name), ExitCode::usage, where, name, " is missing: transformers takes ", otherwise, ", which is not MX");
  }
};

// Several groups may give a target only one scheme, because which of two counts depends on the order in the file.
void PackedConfig::read_compressed_tensors(Keys& keys) {
  keys.ignore({"quant_method", "version", "global_compression_ratio", "run_compressed"});
  keys.only("format", {"mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision"});
  keys.only("quantization_status", {"compressed"});
  keys.only("kv_cache_scheme", {});
  for (const char* const name : {"sparsity_config", "transform_config"}) keys.only(name, {Json(Json::Members())});
  keys.only("moe_sparsity_config", {});
  keys.require_present("config_groups");
  const Json& groups = keys.value("config_groups");
  if (!groups.is_object()) keys.wrong("config_groups", "an object");
  std::map<std::string, std::string> group_of;
  for (const auto& [name, group] : groups.members()) {
    require(!group.is_list(), ExitCode::usage, keys.where, "config_groups.", name, " is the name of a scheme: write the scheme out");
    const std::string where = text(keys.key, ".config_groups.", name, ".");
    const PackedScheme scheme = read_group(group, keys.source, where);
    ArchitectureKeys of_group(group, keys.source, where);
    of_group.require_present("targets");
    for (const std::string& target : names_of(of_group, "targets")) {
      const auto [named, is_new] = targets_.emplace(target, scheme);
      const std::string& first = group_of.emplace(target, name).first->second;
      require(is_new || named->second == scheme, ExitCode::usage, keys.where, "config_groups: ", first, " and ", name,
              " both name the target \"", shortened(target), "\", with different schemes: name it in one of them");
    }
  }
  for (const auto& [target, scheme] : targets_) {
    if (!target.starts_with(kExpression)) continue;
    const std::string where = keys.where_of("config_groups", target);
    Pattern pattern = expression_of(target.substr(kExpression.size()), "", where);
    expressions_.emplace_back(Expression{.where = where, .pattern = std::move(pattern)}, scheme);
  }
  const std::vector<std::string> ignored = names_of(keys, "ignore");
  keep_list(keys, "ignore", ignored, true);
  for (const std::string& name : ignored) {
    const std::string where = keys.where_of("ignore", name);
    if (name.starts_with(kExpression))
      ignored_expressions_.push_back({.where = where, .pattern = expression_of(name.substr(kExpression.size()), "", where)});
    else
      ignored_.insert(name);
  }
}

// Matches as should_convert_module() of transformers: names are expressions that match up to the end of a module, or ends of names.
void PackedConfig::read_not_converted(Keys& keys, const std::string& key) {
  const std::vector<std::string> names = names_of(keys, key);
  if (names_modules_) keep_list(keys, key, names, false);
  for (const std::string& name : names) {
    const std::string where = keys.where_of(key, name);
    ignored_expressions_.push_back({.where = where, .pattern = expression_of(name, R"((?:(?<=\.)|(?=\.|$)))", where)});
    ignored_ends_.insert(name);
  }
}

void PackedConfig::read_one_scheme(Keys& keys, const std::string& method) {
  keys.ignore({"quant_method"});
  if (method == "mxfp4") {  // experts of gpt-oss, whose inputs stay in high precision, and nothing else whatever the list says
    names_modules_ = false;
    one_ = PackedScheme{.format = Format::e2m1};
    keys.only("dequantize", {false});
    return read_not_converted(keys, "modules_to_not_convert");
  }
  one_ = PackedScheme{.format = Format::e4m3, .inputs = Format::e4m3};
  if (method == "mxfp8") {
    keys.only("activation_scheme", {"dynamic"});
    keys.only("fmt", {"e4m3"});
    keys.require_said("scale_fmt", "\"float\"");
    keys.only("scale_fmt", {"ue8m0"});
    keys.require_said("weight_block_size", "[128,128]");
    keys.only("weight_block_size", {Json{1, kPackedBlock}});
    return read_ignored_layers(keys);
  }
  if (method == "fp8") {  // in blocks; without them other programs have one scale for a whole tensor
    keys.only("activation_scheme", {"dynamic"});
    keys.only("fmt", {"e4m3"});
    require(keys.has("weight_block_size"), ExitCode::usage, keys.where,
            "weight_block_size is missing: a scale is then that of a whole tensor, and mantissa reads fp8 in blocks of [128,128] only");
    keys.only("weight_block_size", {Json{kTile, kTile}});
    keys.only("scale_fmt", {"ue8m0", "float"});
    keys.only("expert_dtype", {"fp8", "fp4"});
    block_fp8_ = true;
    input_scales_are_powers_ = keys.word("scale_fmt", "float") == "ue8m0";
    one_->block = kTile;
    if (keys.word("expert_dtype", "fp8") == "fp4") routed_ = PackedScheme{.format = Format::e2m1, .inputs = Format::e4m3, .block = kTile};
    return read_ignored_layers(keys);
  }
  const std::string algorithm = method == "modelopt" ? keys.word("quant_algo", "") : "";
  const bool inputs = algorithm == "NVFP4", two_levels = inputs || algorithm == "W4A16_NVFP4";
  require(
      two_levels || algorithm == "MXFP8", ExitCode::usage, keys.where, "quant_method \"", shortened(method),
      "\": mantissa knows compressed-tensors in MXFP8, MXFP4 and NVFP4, mxfp8, mxfp4, fp8 in blocks of 128, and modelopt with quant_algo "
      "MXFP8, NVFP4 or W4A16_NVFP4");
  if (two_levels) one_ = packed_scheme(Format::nvfp4, inputs ? Format::nvfp4 : Format::none);
  read_modelopt(keys);
}

void PackedConfig::read_ignored_layers(Keys& keys) {
  keys.only("dequantize", {false});
  const bool both = keys.has("modules_to_not_convert") && keys.has("ignored_layers");
  if (both && keys.value("modules_to_not_convert") != keys.value("ignored_layers"))
    keys.refuse("ignored_layers", "modules_to_not_convert says otherwise");
  read_not_converted(keys, keys.has("modules_to_not_convert") ? "modules_to_not_convert" : "ignored_layers");
}

void PackedConfig::read_modelopt(Keys& keys) {
  keys.only("group_size", {one_->block});
  for (const char* const name : {"kv_cache_quant_algo", "kv_cache_scheme"}) keys.only(name, {});
  keys.ignore({"producer", "config_groups"});  // ModelOpt repeats in the latter what quant_algo says
  for (const char* const key : {"ignore", "exclude_modules"}) {
    const std::vector<std::string> names = names_of(keys, key);
    keep_list(keys, key, names, true);
    for (const std::string& name : names) {
      const std::string where = keys.where_of(key, name);
      require(name.find('[') == std::string::npos, ExitCode::usage, where, " has [: mantissa reads the wildcards * and ?");
      std::string whole;  // as Python's fnmatch: * and ? for the whole name
      const auto is_word = [](char c) { return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
      for (const char c : name) whole += c == '*' ? std::string(".*") : c == '?' ? "." : is_word(c) ? std::string(1, c) : text("\\", c);
      ignored_expressions_.push_back({.where = where, .pattern = expression_of(whole + "$", "", where)});
    }
  }
}

void PackedConfig::keep_list(const Keys& keys, const std::string& key, const std::vector<std::string>& names, bool whole_names) {
  if (!names.empty()) lists_.push_back({.where = keys.where + key, .entries = names, .whole_names = whole_names});
}

// Other members than those of the mode are modules: true, false, or a mode of their own. A module without an entry is codes if the file has
// scales of it.
void PackedConfig::read_mlx(const Json& config, const std::string& source) {
  constexpr const char* kKey = "quantization";
  const Json& quantization = config.at(kKey);
  where_ = text(source, ": ", kKey);
  names_modules_ = false;
  mlx_ = true;
  const bool inputs = config.get("quantize_activations") == Json(true);
  const auto read_mode = [](Keys& keys) {
    require(keys.has("mode"), ExitCode::usage, keys.where, "mode is missing: mlx-lm takes affine, which is not MX");
    keys.only("mode", {"mxfp8", "mxfp4", "nvfp4"});
    const std::string mode = keys.word("mode", "");
    const Format format = mode == "nvfp4" ? Format::nvfp4 : mode == "mxfp4" ? Format::e2m1 : Format::e4m3;
    for (const char* const name : {"group_size", "bits"}) keys.require_present(name);
    keys.only("group_size", {packed_form(format).block_cols});
    keys.only("bits", {format == Format::e4m3 ? 8 : 4});
    return format;
  };
  const auto scheme = [&](Format format) {
    return packed_scheme(format, !inputs ? Format::none : format == Format::nvfp4 ? format : Format::e4m3);
  };
  Keys keys(quantization, source, kKey);
  one_ = scheme(read_mode(keys));
  for (const auto& [module, value] : quantization.members()) {
    if (module == "group_size" || module == "bits" || module == "mode" || value == Json(true)) continue;
    if (value == Json(false)) {
      ignored_.insert(module);
      continue;
    }
    if (!value.is_object()) keys.wrong(module, "true, false or an object");
    Keys own(value, source, text(kKey, ".", module));
    targets_.emplace(module, scheme(read_mode(own)));
    own.require_all_known();
  }
}

PackedConfig::PackedConfig(std::string_view content, const std::string& source, const std::string& key) : where_(source + ": " + key) {
  const Json config = parse_json(content, source);
  if (config.get("quantization").is_object()) {
    read_mlx(config, source);
    return;
  }
  Keys keys(config, source, key);
  const std::string method = keys.word("quant_method", "");
  method == "compressed-tensors" ? read_compressed_tensors(keys) : read_one_scheme(keys, method);
  keys.require_all_known();
}

PackedConfig PackedConfig::of_modelopt(std::string_view side_file, const std::string& source) {
  const Json file = parse_json(side_file, source);
  ArchitectureKeys keys(file, source);
  keys.ignore({"producer"});
  keys.require_present("quantization");
  Json config = keys.value("quantization");
  if (!config.is_object()) keys.wrong("quantization", "an object");
  keys.require_all_known();
  config["quant_method"] = "modelopt";
  return PackedConfig(config.dump(), source, "quantization");
}

bool PackedConfig::Expression::matches(const std::string& module) const {
  return at_expression(where, [&] { return pattern.matches(module); });
}

// Matches as match_targets() of compressed-tensors: names before expressions, these by alphabet, and classes last.
std::optional<PackedScheme> PackedConfig::scheme(const std::string& module) const {
  if (ignored_.contains(module) || std::ranges::any_of(kClasses, [&](const char* name) { return ignored_.contains(name); }) ||
      std::ranges::any_of(ignored_ends_, [&](const std::string& end) { return module.ends_with(end); }) ||
      std::ranges::any_of(ignored_expressions_, [&](const Expression& one) { return one.matches(module); }))
    return {};
  if (routed_ && is_routed_expert(module)) return routed_;
  const auto named = targets_.find(module);
  std::optional<PackedScheme> found = named != targets_.end() ? named->second : one_;
  if (found && mlx_ && (is_routed_expert(module) || module.find(".switch_mlp.") != std::string::npos))
    found->inputs = Format::none;  // mlx-lm never quantizes those of experts
  if (found) return found;
  for (const auto& [expression, scheme] : expressions_) {
    if (expression.matches(module)) return scheme;
  }
  for (const char* const name : kClasses) {
    if (const auto of_class = targets_.find(name); of_class != targets_.end()) return of_class->second;
  }
  return {};
}

}  // namespace mantissa
