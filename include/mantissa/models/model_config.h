// Defines shape and options of the GPT. Members are named as their keys in JSON (section "model"), which follow Hugging Face where it has
// the name.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/json/config.h"

namespace mantissa {

enum class Norm { rms, layer };
enum class Position { rope, learned };
enum class RopeScaling { llama3, yarn };
enum class Activation { swiglu, swiglu_clamped, gelu_tanh, gelu_erf };  // gelu_tanh: GPT-2 of Hugging Face and llm.c; gelu_erf: nanoGPT
enum class AttentionBias { none, qkv, all };                            // qkv: Qwen2; all: GPT-2
enum class LogitsDtype { compute, fp32 };
enum class Recompute { none, selective, full };  // selective: attention and activation; full: only the layer input is kept

constexpr auto choices(Norm) { return std::array{Choice{"rms", Norm::rms}, Choice{"layer", Norm::layer}}; }
constexpr auto choices(Position) { return std::array{Choice{"rope", Position::rope}, Choice{"learned", Position::learned}}; }
constexpr auto choices(RopeScaling) { return std::array{Choice{"llama3", RopeScaling::llama3}, Choice{"yarn", RopeScaling::yarn}}; }
constexpr auto choices(Activation) {
  return std::array{Choice{"swiglu", Activation::swiglu}, Choice{"swiglu_clamped", Activation::swiglu_clamped},
                    Choice{"gelu_tanh", Activation::gelu_tanh}, Choice{"gelu_erf", Activation::gelu_erf}};
}
constexpr auto choices(AttentionBias) {
  return std::array{Choice{"none", AttentionBias::none}, Choice{"qkv", AttentionBias::qkv}, Choice{"all", AttentionBias::all}};
}
constexpr auto choices(LogitsDtype) { return std::array{Choice{"compute", LogitsDtype::compute}, Choice{"fp32", LogitsDtype::fp32}}; }

constexpr auto choices(Recompute) {
  return std::array{Choice{"none", Recompute::none}, Choice{"selective", Recompute::selective}, Choice{"full", Recompute::full}};
}

constexpr auto choices(RouterScore) { return std::array{Choice{"softmax", RouterScore::softmax}, Choice{"sigmoid", RouterScore::sigmoid}}; }

// Receives the key of an option, "model.moe.num_experts", and what is wrong with it. Other options are named in it by their keys, those of
// the same section without the section.
using OptionError = std::function<void(const std::string& key, const std::string& why)>;

// Section "model.rope_scaling" stretches the rotary frequencies to longer sequences than those of pretraining, as Hugging Face's
// rope_scaling of the same type does (models/rope_table.h). Members of the other type stay null.
struct RopeScalingConfig {
  RopeScaling type = RopeScaling::llama3;
  double factor = 8.0;
  int64_t original_max_position_embeddings = 8192;
  std::optional<double> low_freq_factor = {}, high_freq_factor = {};
  std::optional<double> beta_fast = {}, beta_slow = {};
  std::optional<bool> truncate = {};
  std::optional<double> attention_factor = {}, mscale = {}, mscale_all_dim = {};

  void validate(const struct ModelConfig& model, const OptionError& report) const;

  void fields(auto& v) {
    v("type", type, "llama3: low frequencies are divided by factor; yarn: the same, and cos and sin are scaled");
    v("factor", factor, "how many times longer sequences get", Limits{.min = 1});
    v("original_max_position_embeddings", original_max_position_embeddings, "longest sequence of the first training",
      limits::between(1, 1 << 24));
    v("low_freq_factor", low_freq_factor,
      "llama3: frequencies with fewer rotations than this in that sequence are divided by factor; null: 1", limits::positive);
    v("high_freq_factor", high_freq_factor, "llama3: frequencies with more rotations are kept, those in between are blended; null: 4",
      limits::positive);
    v("beta_fast", beta_fast, "yarn: channels with more rotations than this in that sequence are kept; null: 32", limits::positive);
    v("beta_slow", beta_slow, "yarn: channels with fewer rotations are divided by factor, those in between are blended; null: 1",
      limits::positive);
    v("truncate", truncate, "yarn: the blend begins and ends at whole channels; null: true");
    v("attention_factor", attention_factor,
      "yarn: factor of cos and sin; null: m(1), or m(mscale) / m(mscale_all_dim), with m(s) = 0.1 * s * log(factor) + 1", limits::positive);
    v("mscale", mscale, "yarn: see attention_factor", limits::positive);
    v("mscale_all_dim", mscale_all_dim, "yarn: see attention_factor", limits::positive);
  }
};

// Section "model.moe" says which layers have experts in place of an MLP, and how tokens are routed (RoutingRule).
struct MoeConfig {
  int64_t num_experts = 8;
  int64_t num_experts_per_tok = 2;
  int64_t intermediate_size = 512;
  int64_t shared_intermediate_size = 0;
  std::vector<int64_t> dense_layers = {};
  RouterScore score = RouterScore::softmax;
  bool softmax_after_topk = false;
  std::optional<bool> norm_topk_prob = {};
  double routed_scaling_factor = 1.0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  double aux_loss_coef = 0.001;
  double seq_aux_loss_coef = 0.0;
  double z_loss_coef = 0.0;
  double bias_update_rate = 0.0;
  std::optional<double> capacity_factor = {};
  bool force_balance = false;
  bool router_bias = false;
  bool expert_mlp_bias = false;

  RoutingRule rule() const;
  bool has_expert_bias() const { return bias_update_rate > 0.0; }
  // Returns how many assignments one expert takes of so many tokens: ceil(tokens * num_experts_per_tok / num_experts * capacity_factor); 0:
  // all.
  int64_t capacity(int64_t tokens) const;
  void validate(const struct ModelConfig& model, const OptionError& report) const;

  void fields(auto& v) {
    v("num_experts", num_experts, "experts of a layer", limits::between(1, 65536));
    v("num_experts_per_tok", num_experts_per_tok, "experts that each token goes to", limits::between(1, 1024));
    v("intermediate_size", intermediate_size, "width inside an expert", limits::between(1, 1 << 22));
    v("shared_intermediate_size", shared_intermediate_size, "width of the shared expert, an MLP that every token goes to; 0: none",
      limits::between(0, 1 << 22));
    v("dense_layers", dense_layers, "layers, counted from 0, that have a dense MLP instead of experts");
    v("score", score, "score of the router: softmax over the experts, or sigmoid of each");
    v("softmax_after_topk", softmax_after_topk,
      "router weights are the softmax over the logits of the chosen experts only; needs score softmax");
    v("norm_topk_prob", norm_topk_prob,
      "divide the router weights of a token by their sum; null: if num_experts_per_tok is above 1, as a single weight would always be 1");
    v("routed_scaling_factor", routed_scaling_factor, "factor of the router weights", limits::positive);
    v("n_group", n_group, "groups of experts; only experts of the best topk_group groups are chosen", limits::between(1, 65536));
    v("topk_group", topk_group, "groups from which experts are chosen", limits::between(1, 65536));
    v("aux_loss_coef", aux_loss_coef, "coefficient of the load-balance loss of a micro batch", limits::between(0, 1000));
    v("seq_aux_loss_coef", seq_aux_loss_coef, "coefficient of the load-balance loss of each sequence", limits::between(0, 1000));
    v("z_loss_coef", z_loss_coef, "coefficient of the router z-loss, the mean of log-sum-exp(logits)^2", limits::between(0, 1000));
    v("bias_update_rate", bias_update_rate,
      "loss-free balance: after each step the bias of every expert, which is added to its score for the choice only, moves by this against "
      "its load; 0: no biases; needs score sigmoid",
      limits::between(0, 1000));
    v("capacity_factor", capacity_factor,
      "an expert takes ceil(tokens * num_experts_per_tok / num_experts * this) tokens of a micro batch and drops later ones, in training; "
      "null: all",
      limits::positive);
    v("force_balance", force_balance, "for benchmarks: tokens go to experts in turn, whatever their scores");
    v("router_bias", router_bias, "a trained bias of the router's logits");
    v("expert_mlp_bias", expert_mlp_bias, "biases of both linears of every expert");
  }
};

// Keeps counts of parameters within 64 bits.
inline constexpr int64_t kWidestHeads = 1 << 22;

struct ModelConfig {
  std::optional<int64_t> vocab_size;
  int64_t pad_vocab_to = 1;
  int64_t hidden_size = 512;
  int64_t num_layers = 8;
  int64_t num_attention_heads = 8;
  std::optional<int64_t> num_key_value_heads;
  std::optional<int64_t> head_dim;
  int64_t intermediate_size = 1408;
  int64_t max_position_embeddings = 1024;
  Norm norm = Norm::rms;
  double norm_eps = 1e-6;
  bool norm_bias = false;
  Position position = Position::rope;
  double rope_theta = 10000.0;
  std::optional<RopeScalingConfig> rope_scaling;
  Activation activation = Activation::swiglu;
  std::optional<double> swiglu_limit;
  AttentionBias attention_bias = AttentionBias::none;
  std::optional<int64_t> sliding_window;
  std::vector<int64_t> sliding_layers;
  bool attention_sinks = false;
  bool mlp_bias = false;
  bool qk_norm = true;
  bool tie_word_embeddings = false;
  LogitsDtype logits_dtype = LogitsDtype::compute;
  double init_std = 0.02;
  bool init_residual_scale = true;
  std::optional<MoeConfig> moe;

  bool has_experts(int64_t layer) const;
  int64_t expert_layers() const;        // how many layers have experts
  int64_t window(int64_t layer) const;  // keys that a query of the layer sees at most; 0: all
  bool gated() const { return activation == Activation::swiglu || activation == Activation::swiglu_clamped; }
  double glu_limit() const { return activation == Activation::swiglu_clamped ? swiglu_limit.value_or(7.0) : 0.0; }  // 0: none
  int64_t kv_heads() const { return num_key_value_heads.value_or(num_attention_heads); }
  int64_t head_size() const { return head_dim.value_or(hidden_size / num_attention_heads); }
  // Returns the rows of the embedding and the output projection. Throws Error(internal) while vocab_size is null.
  int64_t padded_vocab_size() const;

  // Checks what no single field can show: divisibility, and options that exclude each other.
  void validate(const OptionError& report) const;
  void validate(ConfigReport& report) const;

  void fields(auto& v) {
    v("vocab_size", vocab_size, "token ids; null: the size of the tokenizer", limits::between(1, std::numeric_limits<int32_t>::max()));
    v("pad_vocab_to", pad_vocab_to, "rows of embedding and output are rounded up to a multiple of this; padded ids are never predicted",
      limits::between(1, 65536));
    v("hidden_size", hidden_size, "width of the residual stream", limits::between(1, 1 << 20));
    v("num_layers", num_layers, "transformer blocks", limits::between(1, 10000));
    v("num_attention_heads", num_attention_heads, "query heads", limits::between(1, 65536));
    v("num_key_value_heads", num_key_value_heads, "key and value heads, a divisor of the query heads; null: num_attention_heads",
      limits::between(1, 65536));
    v("head_dim", head_dim, "width of one head; null: hidden_size / num_attention_heads", limits::between(1, 65536));
    v("intermediate_size", intermediate_size, "width inside the MLP", limits::between(1, 1 << 22));
    v("max_position_embeddings", max_position_embeddings, "longest sequence", limits::between(1, 1 << 24));
    v("norm", norm, "rms: RMSNorm; layer: LayerNorm");
    v("norm_eps", norm_eps, "added to the variance (mean square) before the root", limits::positive);
    v("norm_bias", norm_bias, "bias in the norms; needs norm layer");
    v("position", position, "rope: rotary (rotate-half); learned: an embedding per position");
    v("rope_theta", rope_theta, "base of the rotary frequencies", limits::positive);
    v("rope_scaling", rope_scaling, "scaling of the rotary frequencies for longer sequences; null: none");
    v("activation", activation,
      "MLP: swiglu (gated SiLU), swiglu_clamped (that of gpt-oss, within swiglu_limit), gelu_tanh (tanh form), gelu_erf (exact form)");
    v("swiglu_limit", swiglu_limit, "swiglu_clamped: upper bound of the gate, and bound of the magnitude of up; null: 7", limits::positive);
    v("attention_bias", attention_bias, "biases of the attention linears: none, qkv, all (qkv and out)");
    v("sliding_window", sliding_window, "a token attends to this many of the latest tokens, itself included; null: to all before it",
      limits::between(1, 1 << 24));
    v("sliding_layers", sliding_layers, "layers, counted from 0, that have the window; empty: all; needs sliding_window");
    v("attention_sinks", attention_sinks,
      "a learned logit of each query head that takes its share of the softmax, without a key or a value");
    v("mlp_bias", mlp_bias, "biases of the MLP linears");
    v("qk_norm", qk_norm, "RMSNorm over each query and key head before the position encoding");
    v("tie_word_embeddings", tie_word_embeddings, "the output projection is the embedding");
    v("logits_dtype", logits_dtype, "compute: precision.dtype; fp32");
    v("init_std", init_std, "standard deviation of the initial weights", limits::positive);
    v("init_residual_scale", init_residual_scale, "attn.out and down start at init_std / sqrt(2 * num_layers)");
    v("moe", moe, "mixture of experts; null: dense");
  }
};

extern template const FieldType& detail::field_type<ModelConfig>();
extern template const FieldType& detail::field_type<MoeConfig>();
extern template const FieldType& detail::field_type<RopeScalingConfig>();

}  // namespace mantissa
