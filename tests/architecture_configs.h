// What a config.json of each architecture may say.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "files.h"
#include "mantissa/hf/hugging_face.h"

namespace mantissa::test {

inline nlohmann::json config_of(const std::string& type) {
  if (type == "gpt2") {
    return {{"model_type", "gpt2"}, {"architectures", {"GPT2LMHeadModel"}},
            {"vocab_size", 259},    {"n_embd", 96},
            {"n_layer", 2},         {"n_head", 4},
            {"n_positions", 64},    {"n_inner", nullptr}};
  }
  nlohmann::json config = {{"model_type", type},          {"vocab_size", 259},        {"hidden_size", 96},
                           {"intermediate_size", 160},    {"num_hidden_layers", 3},   {"num_attention_heads", 4},
                           {"num_key_value_heads", 2},    {"head_dim", 32},           {"max_position_embeddings", 64},
                           {"rms_norm_eps", 1e-5},        {"rope_theta", 5e5},        {"hidden_act", "silu"},
                           {"tie_word_embeddings", true}, {"torch_dtype", "bfloat16"}};
  if (type == "qwen2") config.erase("head_dim");
  if (type == "gpt_oss")
    config.update({{"num_local_experts", 6}, {"num_experts_per_tok", 2}, {"attention_bias", true}, {"sliding_window", 4}});
  if (type == "mixtral") config.update({{"num_local_experts", 6}, {"num_experts_per_tok", 2}});
  if (type == "qwen3_moe")
    config.update({{"num_experts", 6},
                   {"num_experts_per_tok", 2},
                   {"moe_intermediate_size", 64},
                   {"norm_topk_prob", true},
                   {"mlp_only_layers", {1}}});
  return config;
}

inline ArchitectureConfig read(const nlohmann::json& config) { return read_architecture_config(config.dump(), "config.json"); }
inline Error refused(const nlohmann::json& config) {
  return error_of([&] { read(config); });
}

struct Refusal {
  const char* type;
  nlohmann::json change;
  const char* what;
};

}  // namespace mantissa::test
