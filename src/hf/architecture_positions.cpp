#include <algorithm>
#include <nlohmann/json.hpp>

#include "hf/architecture_options.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

using nlohmann::json;

// Copies members that are named alike here; null where the architecture says nothing.
json scaling_of(ArchitectureKeys& rope, const std::string& type, int64_t longest) {
  json out = {{"type", type}, {"original_max_position_embeddings", rope.integer("original_max_position_embeddings").value_or(longest)}};
  const bool yarn = type == "yarn";
  const auto original = static_cast<double>(out["original_max_position_embeddings"].get<int64_t>());
  out["factor"] = yarn && rope.is_null("factor") ? static_cast<double>(longest) / std::max(1.0, original) : rope.needed_number("factor");
  if (!yarn) {
    for (const char* const name : {"low_freq_factor", "high_freq_factor"}) out[name] = rope.needed_number(name);
    return out;
  }
  for (const char* const name : {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}) {
    if (const std::optional<double> number = rope.number(name)) out[name] = *number;
  }
  if (rope.has("truncate")) out["truncate"] = rope.flag("truncate", true);
  return out;
}

struct RopeKeys {
  std::optional<double> theta = {};
  json scaling = {};  // null: none
};

RopeKeys rope_of(ArchitectureKeys& keys, const std::string& source, const char* name, int64_t longest) {
  ArchitectureKeys rope(keys.value(name), source, std::string(name) + ".");
  RopeKeys out{.theta = rope.number("rope_theta")};
  rope.only("partial_rotary_factor", {1.0, 1});
  const std::string type = rope.word("rope_type", rope.word("type", "default"));
  if (rope.word("type", type) != type) rope.refuse("type", "rope_type is \"" + type + "\"");
  const bool scales = type == "llama3" || type == "yarn";
  if (!scales && type != "default") rope.refuse(rope.has("rope_type") ? "rope_type" : "type", "mantissa knows default, llama3 and yarn");
  if (scales) out.scaling = scaling_of(rope, type, longest);
  rope.require_all_known();
  return out;
}

// gpt-oss is scaled by default.
json gpt_oss_scaling() {
  return {{"type", "yarn"},   {"factor", 32.0},    {"beta_fast", 32.0},
          {"beta_slow", 1.0}, {"truncate", false}, {"original_max_position_embeddings", 4096}};
}

void require_clear_scaling(ArchitectureKeys& keys) {
  const bool empty = keys.is_null("rope_scaling") || (keys.has("rope_scaling") && keys.value("rope_scaling").empty());
  if (empty && !keys.has("rope_parameters"))
    keys.refuse("rope_scaling",
                "transformers 4 takes this as unscaled and transformers 5 as yarn; write {\"rope_type\": \"default\"} or the scaling");
}

std::vector<int64_t> layers_by_type(ArchitectureKeys& keys, int64_t layers) {
  const json& types = keys.value("layer_types");
  const bool known = types.is_array() && std::cmp_equal(types.size(), layers) &&
                     std::ranges::all_of(types, [](const json& type) { return type == "full_attention" || type == "sliding_attention"; });
  if (!known) keys.refuse("layer_types", "mantissa knows \"full_attention\" and \"sliding_attention\", one for each layer");
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < layers; ++i) {
    if (types[static_cast<size_t>(i)] == "sliding_attention") sliding.push_back(i);
  }
  return sliding;
}

// Returns none if all tokens are seen, or no layer says otherwise.
std::optional<int64_t> window_of(ArchitectureKeys& keys, Architecture architecture) {
  const std::optional<int64_t> given = keys.integer("sliding_window");
  const bool absent = !given && !keys.is_null("sliding_window");
  if (architecture == Architecture::mixtral) return given;
  if (architecture == Architecture::gpt_oss) return absent ? 128 : given;
  if (!keys.flag("use_sliding_window", false)) return {};
  return absent ? 4096 : given;
}

std::vector<int64_t> layers_by_class(ArchitectureKeys& keys, Architecture architecture, int64_t layers, bool windows) {
  const bool qwen = architecture == Architecture::qwen2 || architecture == Architecture::qwen3;
  if (qwen && windows && keys.is_null("max_window_layers")) keys.wrong("max_window_layers", "an integer");
  const int64_t first = keys.integer("max_window_layers").value_or(28);
  std::vector<int64_t> sliding;
  for (int64_t i = 0; i < layers; ++i) {
    if (architecture == Architecture::gpt_oss ? i % 2 == 0 : windows && (!qwen || i >= first)) sliding.push_back(i);
  }
  return sliding;
}

}  // namespace

void read_rope(ArchitectureKeys& keys, const std::string& source, Architecture architecture, json& model) {
  keys.only("partial_rotary_factor", {1.0, 1});
  if (architecture == Architecture::gpt_oss) require_clear_scaling(keys);
  std::optional<double> theta = keys.number("rope_theta");
  std::optional<json> scaling;
  for (const char* const name : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(name)) continue;
    const RopeKeys rope = rope_of(keys, source, name, model["max_position_embeddings"].get<int64_t>());
    if (theta && rope.theta && *theta != *rope.theta) keys.refuse(name, text("rope_theta differs: ", *theta, " stands beside it"));
    if (rope.theta) theta = rope.theta;
    if (scaling && *scaling != rope.scaling) keys.refuse(name, "rope_scaling says otherwise");
    scaling = rope.scaling;
  }
  if (!scaling && architecture == Architecture::gpt_oss) scaling = gpt_oss_scaling();
  if (scaling && !scaling->is_null()) model["rope_scaling"] = *scaling;
  model["rope_theta"] = theta.value_or(class_defaults(architecture).rope_theta);
}

void read_windows(ArchitectureKeys& keys, Architecture architecture, json& model) {
  const auto layers = model["num_layers"].get<int64_t>();
  const std::optional<int64_t> window = window_of(keys, architecture);
  std::vector<int64_t> sliding = layers_by_class(keys, architecture, layers, window.has_value());
  if (keys.has("layer_types")) {
    const std::vector<int64_t> typed = layers_by_type(keys, layers);
    const bool by_class = architecture == Architecture::mixtral || architecture == Architecture::qwen3_moe;  // whose classes do not read it
    if (by_class && typed != sliding) keys.refuse("layer_types", "layers of this architecture are all alike, by sliding_window");
    sliding = typed;
  }
  if (sliding.empty()) return;
  if (!window && keys.has("layer_types")) keys.refuse("layer_types", "there is no sliding_window");
  if (!window) keys.refuse("sliding_window", "every second layer of gpt-oss has one, unless layer_types says otherwise");
  model["sliding_window"] = *window;
  if (std::cmp_less(sliding.size(), layers)) model["sliding_layers"] = sliding;
}

}  // namespace mantissa
