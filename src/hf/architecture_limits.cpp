#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "hf/architecture_options.h"
#include "mantissa/base/text.h"
#include "mantissa/json/config.h"

namespace mantissa {
namespace {

using nlohmann::json;
using Names = std::map<std::string, std::string>;

// Maps options of section "model" whose key is another in the file.
Names names_in_file(ArchitectureKeys& keys, Architecture architecture) {
  if (architecture == Architecture::gpt2)
    return {{"hidden_size", "n_embd"},
            {"num_layers", "n_layer"},
            {"num_attention_heads", "n_head"},
            {"intermediate_size", "n_inner"},
            {"max_position_embeddings", "n_positions"},
            {"norm_eps", "layer_norm_epsilon"}};
  const std::string rope = keys.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  Names names = {{"num_layers", "num_hidden_layers"},
                 {"norm_eps", "rms_norm_eps"},
                 {"moe.num_experts", keys.has("num_experts") ? "num_experts" : "num_local_experts"},
                 {"moe.num_experts_per_tok", "num_experts_per_tok"},
                 {"moe.intermediate_size", architecture == Architecture::qwen3_moe ? "moe_intermediate_size" : "intermediate_size"},
                 {"moe.aux_loss_coef", "router_aux_loss_coef"},
                 {"moe.softmax_after_topk", "num_experts_per_tok"},
                 {"rope_scaling", rope},
                 {"rope_scaling.type", rope + ".rope_type"}};
  if (!keys.has("rope_theta") && keys.has(rope)) names["rope_theta"] = rope + ".rope_theta";
  for (const char* const name : {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast",
                                 "beta_slow", "attention_factor", "mscale", "mscale_all_dim"})
    names[text("rope_scaling.", name)] = text(rope, ".", name);
  return names;
}

bool in_key(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.'; }

// "model.num_layers" with its section, or "num_layers" in a message of a section that has it.
std::string word_of_file(const std::string& word, const Names& names) {
  const std::string section = "model.";
  const bool whole = word.starts_with(section);
  const std::string key = whole ? word.substr(section.size()) : word;
  for (const char* const prefix : {"", "moe.", "rope_scaling."}) {
    const auto found = names.find(prefix + key);
    if (found != names.end()) return found->second;
    if (whole) break;
  }
  return key;
}

std::string in_words_of_file(const std::string& line, const Names& names) {
  std::string out;
  for (size_t at = 0; at < line.size();) {
    size_t end = at;
    while (end < line.size() && in_key(line[end])) ++end;
    out += end > at ? word_of_file(line.substr(at, end - at), names) : line.substr(at, 1);
    at = std::max(end, at + 1);
  }
  return out;
}

// Converts "  model.num_layers: must be at least 1, got 0   (config.json:1:20)", whose place is in the converted text, to the words of the
// file.
std::string line_of_file(const std::string& line, ArchitectureKeys& keys, const Names& names) {
  std::string message = in_words_of_file(line.substr(0, line.rfind("   (")), names);
  const std::string of_runs = " or null";  // options that a file must have
  if (const size_t at = message.find(of_runs); at != std::string::npos) message.erase(at, of_runs.size());
  const size_t begin = message.find_first_not_of(' '), colon = message.find(':');
  if (begin == std::string::npos || colon == std::string::npos || colon < begin) return message;
  const std::string key = message.substr(begin, colon - begin);
  const bool of_class = std::ranges::all_of(key, [](char c) { return in_key(c) && c != '.'; }) && !keys.has(key);
  return message + (of_class ? "; the file does not say, so its class in transformers does" : "");
}

struct ModelSection {
  ModelConfig model;
  void fields(auto& v) { v("model", model, "of a config.json"); }
};

}  // namespace

ModelConfig architecture_model(const json& options, ArchitectureKeys& keys, Architecture architecture, const std::string& source) {
  ModelSection section;
  ConfigReport report;
  read_config({.file = "config.json", .text = json{{"model", options}}.dump()}, fields_of(section), report);
  if (report.ok()) section.model.validate(report);
  try {
    report.throw_if_failed();
  } catch (const Error& error) {
    const Names names = names_in_file(keys, architecture);
    std::vector<std::string> lines = split(error.what(), '\n');
    for (std::string& line : lines) line = line_of_file(line, keys, names);
    fail(ExitCode::usage, source, ": ", joined(lines, "\n"));
  }
  return section.model;
}

}  // namespace mantissa
