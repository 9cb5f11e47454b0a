// Settings that a config.json of each architecture may have.
#pragma once

#include <array>
#include <nlohmann/json.hpp>
#include <string>

#include "files.h"
#include "hf/hugging_face.h"

namespace mantissa::test {

inline constexpr std::array kArchitectureTypes = {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gpt_oss"};

// Changes keys of an object; null stays null, and "absent" takes the key away.
inline nlohmann::json changed(nlohmann::json object, const nlohmann::json& change) {
  for (const auto& [key, value] : change.items()) {
    object[key] = value;
    if (value == "absent") object.erase(key);
  }
  return object;
}

inline nlohmann::json config_of(const std::string& type, const nlohmann::json& change = nlohmann::json::object()) {
  using nlohmann::json;
  if (type == "gpt2") {
    return changed(
        json::parse(R"({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 259, "n_embd": 96, "n_layer": 2,
        "n_head": 4, "n_positions": 64, "n_inner": null})"),
        change);
  }
  json config = json::parse(R"({"vocab_size": 259, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
      "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16"})");
  config["model_type"] = type;
  if (type == "qwen2") config.erase("head_dim");
  if (type == "gpt_oss")
    config.update({{"num_local_experts", 6}, {"num_experts_per_tok", 2}, {"attention_bias", true}, {"sliding_window", 4}});
  if (type == "mixtral") config.update({{"num_local_experts", 6}, {"num_experts_per_tok", 2}});
  if (type == "qwen3_moe")
    config.update(json::parse(R"({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true,
        "mlp_only_layers": [1]})"));
  return changed(config, change);
}

inline ArchitectureConfig read(const nlohmann::json& config) { return read_architecture_config(config.dump(), "config.json"); }

// A change of a config.json, as JSON, after which it is refused, and a part of the message.
struct Refusal {
  const char* type;
  const char* change;
  const char* what;
  ExitCode code = ExitCode::usage;
};

}  // namespace mantissa::test
