#include "mantissa/models/gpt.h"

namespace mantissa {
namespace {

struct LayerCounts {
  int64_t matrices = 0, vectors = 0;
};

LayerCounts layer_counts(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size, head = config.head_size();
  const int64_t q = config.num_attention_heads * head, qkv = q + 2 * config.kv_heads() * head;
  const int64_t up = config.activation == Activation::swiglu ? 2 * config.intermediate_size : config.intermediate_size;
  LayerCounts counts;
  counts.matrices = qkv * hidden + hidden * q + up * hidden + hidden * config.intermediate_size;
  counts.vectors = 2 * hidden * (config.norm_bias ? 2 : 1);
  if (config.qk_norm) counts.vectors += 2 * head;
  if (config.attention_bias != AttentionBias::none) counts.vectors += qkv;
  if (config.attention_bias == AttentionBias::all) counts.vectors += hidden;
  if (config.mlp_bias) counts.vectors += up + hidden;
  return counts;
}

}  // namespace

int64_t count_parameters(const ModelConfig& config) {
  const LayerCounts layer = layer_counts(config);
  const int64_t table = config.padded_vocab_size() * config.hidden_size;
  const int64_t positions = config.position == Position::learned ? config.max_position_embeddings * config.hidden_size : 0;
  const int64_t final_norm = config.hidden_size * (config.norm_bias ? 2 : 1);
  return config.num_layers * (layer.matrices + layer.vectors) + table * (config.tie_word_embeddings ? 1 : 2) + positions + final_norm;
}

double training_flops_per_token(const ModelConfig& config, int64_t seq_len) {
  const double multiplied =
      static_cast<double>(config.num_layers * layer_counts(config).matrices + config.padded_vocab_size() * config.hidden_size);
  const double attention =
      static_cast<double>(config.num_layers * config.num_attention_heads * config.head_size()) * static_cast<double>(seq_len);
  return 6.0 * multiplied + 6.0 * attention;
}

}  // namespace mantissa
