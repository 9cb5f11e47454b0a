// Converts a ModelConfig to the config.json of the architecture that has its options.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "mantissa/hf/hugging_face.h"

namespace mantissa {
namespace {

using nlohmann::ordered_json;

// Formats "model.qk_norm = false" for messages, and collects why a model does not belong to an architecture.
using Problems = std::vector<std::string>;

void need(Problems& problems, bool holds, const std::string& problem) {
  if (!holds) problems.push_back(problem);
}

// Writes what only gpt-oss has.
Problems gpt_oss_alone(const ModelConfig& model) {
  Problems problems;
  need(problems, !model.attention_sinks, "model.attention_sinks: only gpt-oss has them, with model.activation swiglu_clamped");
  need(problems, !model.moe || !model.moe->router_bias, "model.moe.router_bias: only gpt-oss has it, with model.activation swiglu_clamped");
  need(problems, !model.moe || !model.moe->expert_mlp_bias,
       "model.moe.expert_mlp_bias: only gpt-oss has them, with model.activation swiglu_clamped");
  return problems;
}

Problems gpt2_problems(const ModelConfig& model) {
  Problems problems = gpt_oss_alone(model);
  need(problems, !model.sliding_window, "model.sliding_window: GPT-2 has none");
  need(problems, !model.moe, "model.moe: GPT-2 has no experts");
  need(problems, model.norm == Norm::layer && model.norm_bias, "model.norm must be layer, with norm_bias");
  need(problems, model.position == Position::learned, "model.position must be learned");
  need(problems, !model.gated(), "model.activation must be a GELU");
  need(problems, model.attention_bias == AttentionBias::all, "model.attention_bias must be all");
  need(problems, model.mlp_bias, "model.mlp_bias must be true");
  need(problems, !model.qk_norm, "model.qk_norm must be false");
  need(problems, model.kv_heads() == model.num_attention_heads, "model.num_key_value_heads must be num_attention_heads");
  need(problems, model.head_size() * model.num_attention_heads == model.hidden_size,
       "model.head_dim must be hidden_size / num_attention_heads");
  return problems;
}

// Returns whether the weights of a token sum to 1.
bool divides(const MoeConfig& moe) { return moe.rule().softmax_after_topk || moe.rule().renormalize; }

Problems expert_problems(const MoeConfig& moe, bool qwen) {
  Problems problems;
  const auto one = [&](bool holds, const char* what) { need(problems, holds, text("model.moe.", what)); };
  one(!moe.has_expert_bias(), "bias_update_rate: the architecture has no expert biases");
  one(moe.score == RouterScore::softmax, "score: the architecture has softmax");
  one(moe.n_group == 1, "n_group: the architecture chooses among all experts");
  one(moe.routed_scaling_factor == 1.0, "routed_scaling_factor: the architecture has none");
  one(!moe.force_balance, "force_balance: the architecture chooses by scores");
  one(moe.shared_intermediate_size == 0, "shared_intermediate_size: the architecture has no shared experts");
  if (qwen) return problems;
  one(divides(moe), "norm_topk_prob: Mixtral has true, and without model.qk_norm there is only Mixtral");
  one(moe.dense_layers.empty(), "dense_layers: Mixtral has experts in every layer, and without model.qk_norm there is only Mixtral");
  return problems;
}

Problems rms_problems(const ModelConfig& model) {
  Problems problems = gpt_oss_alone(model);
  need(problems, model.norm == Norm::rms, "model.norm: only GPT-2 has layer");
  need(problems, model.position == Position::rope, "model.position: only GPT-2 has learned");
  need(problems, model.gated(), "model.activation: only GPT-2 has a GELU");
  if (model.moe) std::ranges::move(expert_problems(*model.moe, model.qk_norm), std::back_inserter(problems));
  const bool qkv = model.attention_bias == AttentionBias::qkv;
  need(problems, !qkv || (!model.qk_norm && !model.moe),
       "model.attention_bias: qkv without one for out is Qwen2's, which has neither qk_norm nor experts");
  need(problems, !model.mlp_bias || (!model.qk_norm && !qkv && !model.moe), "model.mlp_bias: only Llama has it, without qk_norm");
  need(problems, model.attention_bias == AttentionBias::none || !model.moe || model.qk_norm, "model.attention_bias: Mixtral has none");
  const bool llama = !model.qk_norm && !qkv && !model.moe;
  need(problems, !llama || !model.sliding_window, "model.sliding_window: Llama has none; Qwen3 has, with model.qk_norm");
  need(problems, !model.moe || model.sliding_layers.empty(),
       "model.sliding_layers: Mixtral and Qwen3-MoE have windows in all layers or none");
  need(problems, !llama || model.hidden_size % model.num_attention_heads == 0,
       "model.num_attention_heads: transformers refuses a Llama whose hidden_size is no multiple of it");
  return problems;
}

Problems gpt_oss_problems(const ModelConfig& model) {
  Problems problems;
  need(problems, model.norm == Norm::rms, "model.norm must be rms");
  need(problems, model.position == Position::rope, "model.position must be rope");
  need(problems, !model.qk_norm, "model.qk_norm must be false");
  need(problems, model.attention_bias == AttentionBias::all, "model.attention_bias must be all");
  need(problems, model.attention_sinks, "model.attention_sinks must be true");
  need(problems, model.moe.has_value(), "model.moe: every layer has experts");
  if (!model.moe) return problems;
  std::ranges::move(expert_problems(*model.moe, true), std::back_inserter(problems));
  need(problems, divides(*model.moe), "model.moe.norm_topk_prob must be true");
  need(problems, model.moe->router_bias, "model.moe.router_bias must be true");
  need(problems, model.moe->expert_mlp_bias, "model.moe.expert_mlp_bias must be true");
  need(problems, model.moe->dense_layers.empty(), "model.moe.dense_layers: every layer has experts");
  return problems;
}

// The other architectures with experts have windows in all layers or none.
bool windows_by_layer(Architecture architecture) {
  return architecture != Architecture::mixtral && architecture != Architecture::qwen3_moe;
}

void write_windows(Architecture architecture, const ModelConfig& model, ordered_json& out) {
  const bool qwen = architecture == Architecture::qwen2 || architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe;
  if (qwen) out["use_sliding_window"] = model.sliding_window.has_value();
  if (architecture == Architecture::llama) return;
  out["sliding_window"] = model.sliding_window ? ordered_json(*model.sliding_window) : ordered_json(nullptr);
  if (!model.sliding_window && architecture == Architecture::gpt_oss) out["sliding_window"] = 128;  // must be there, though no layer slides
  if (!windows_by_layer(architecture) || (!model.sliding_window && architecture != Architecture::gpt_oss)) return;
  ordered_json types = ordered_json::array();
  for (int64_t i = 0; i < model.num_layers; ++i) types.push_back(model.window(i) > 0 ? "sliding_attention" : "full_attention");
  out["layer_types"] = std::move(types);
  if (qwen) out["max_window_layers"] = 0;
}

ordered_json rope_scaling(const RopeScalingConfig& scaling) {
  ordered_json out = {{"rope_type", choice_name(scaling.type)},
                      {"factor", scaling.factor},
                      {"original_max_position_embeddings", scaling.original_max_position_embeddings}};
  const auto put = [&](const char* name, const auto& value) {
    if (value) out[name] = *value;
  };
  if (scaling.type == RopeScaling::llama3) {  // which must have both
    out["low_freq_factor"] = scaling.low_freq_factor.value_or(1.0);
    out["high_freq_factor"] = scaling.high_freq_factor.value_or(4.0);
  }
  put("beta_fast", scaling.beta_fast);
  put("beta_slow", scaling.beta_slow);
  put("truncate", scaling.truncate);
  put("attention_factor", scaling.attention_factor);
  put("mscale", scaling.mscale);
  put("mscale_all_dim", scaling.mscale_all_dim);
  return out;
}

ordered_json rms_config(Architecture architecture, const ModelConfig& model) {
  ordered_json out = {{"hidden_act", "silu"},
                      {"hidden_size", model.hidden_size},
                      {"intermediate_size", model.intermediate_size},
                      {"num_hidden_layers", model.num_layers},
                      {"num_attention_heads", model.num_attention_heads},
                      {"num_key_value_heads", model.kv_heads()},
                      {"max_position_embeddings", model.max_position_embeddings},
                      {"rms_norm_eps", model.norm_eps},
                      {"rope_theta", model.rope_theta},
                      {"initializer_range", model.init_std}};
  if (model.rope_scaling) out["rope_scaling"] = rope_scaling(*model.rope_scaling);
  if (!model.rope_scaling && architecture == Architecture::gpt_oss)
    out["rope_scaling"] = {{"rope_type", "default"}};  // without it it is yarn
  if (architecture != Architecture::qwen2 || model.head_size() * model.num_attention_heads != model.hidden_size)
    out["head_dim"] = model.head_size();
  const bool all_biases = model.attention_bias == AttentionBias::all;
  if (architecture == Architecture::llama || architecture == Architecture::qwen3 || architecture == Architecture::qwen3_moe)
    out["attention_bias"] = all_biases;
  if (architecture == Architecture::llama) out["mlp_bias"] = model.mlp_bias;
  write_windows(architecture, model, out);
  if (architecture == Architecture::gpt_oss) {
    out["attention_bias"] = true;
    out["swiglu_limit"] = model.glu_limit();
  }
  if (!model.moe) return out;
  const MoeConfig& moe = *model.moe;
  out["num_experts_per_tok"] = moe.num_experts_per_tok;
  out["router_aux_loss_coef"] = moe.aux_loss_coef;
  out["output_router_logits"] = false;
  if (architecture == Architecture::mixtral || architecture == Architecture::gpt_oss) {
    out["num_local_experts"] = moe.num_experts;
    out["intermediate_size"] = moe.intermediate_size;
    return out;
  }
  out["num_experts"] = moe.num_experts;
  out["moe_intermediate_size"] = moe.intermediate_size;
  out["norm_topk_prob"] = divides(moe);
  out["decoder_sparse_step"] = 1;
  out["mlp_only_layers"] = moe.dense_layers;
  return out;
}

ordered_json gpt2_config(const ModelConfig& model) {
  return {{"activation_function", model.activation == Activation::gelu_tanh ? "gelu_new" : "gelu"},
          {"n_embd", model.hidden_size},
          {"n_layer", model.num_layers},
          {"n_head", model.num_attention_heads},
          {"n_inner", model.intermediate_size},
          {"n_positions", model.max_position_embeddings},
          {"n_ctx", model.max_position_embeddings},
          {"layer_norm_epsilon", model.norm_eps},
          {"initializer_range", model.init_std},
          {"attn_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"resid_pdrop", 0.0}};
}

// Writes null where a model has no such token, because transformers would take the architecture's default.
ordered_json ids(const std::string& tokens) { return tokens.empty() ? ordered_json(nullptr) : ordered_json::parse(tokens); }

}  // namespace

Architecture architecture_of(const ModelConfig& model) {
  const bool gpt2 = model.norm == Norm::layer || model.position == Position::learned || !model.gated();
  const bool gpt_oss = !gpt2 && model.activation == Activation::swiglu_clamped;
  const Problems problems = gpt2 ? gpt2_problems(model) : gpt_oss ? gpt_oss_problems(model) : rms_problems(model);
  require(problems.empty(), ExitCode::usage, "no model of Hugging Face has these options",
          gpt2      ? ", of which GPT-2 is the nearest:\n  "
          : gpt_oss ? ", of which gpt-oss is the nearest:\n  "
                    : ":\n  ",
          joined(problems, "\n  "));
  if (gpt2) return Architecture::gpt2;
  if (gpt_oss) return Architecture::gpt_oss;
  if (model.moe) return model.qk_norm ? Architecture::qwen3_moe : Architecture::mixtral;
  if (model.qk_norm) return Architecture::qwen3;
  return model.attention_bias == AttentionBias::qkv ? Architecture::qwen2 : Architecture::llama;
}

std::string architecture_config(const ModelConfig& model, Dtype dtype, const SpecialTokens& tokens, const std::string& quantization) {
  const Architecture architecture = architecture_of(model);
  ordered_json out = {{"architectures", {architecture_class(architecture)}}, {"model_type", architecture_name(architecture)}};
  out["vocab_size"] = model.vocab_size.value();
  out.update(architecture == Architecture::gpt2 ? gpt2_config(model) : rms_config(architecture, model));
  out["tie_word_embeddings"] = model.tie_word_embeddings;
  out["bos_token_id"] = ids(tokens.begin);
  out["eos_token_id"] = ids(tokens.end);
  if (!tokens.pad.empty()) out["pad_token_id"] = ids(tokens.pad);
  out["torch_dtype"] = dtype == Dtype::bf16 ? "bfloat16" : "float32";
  if (!quantization.empty()) out["quantization_config"] = ordered_json::parse(quantization);
  return out.dump(2) + "\n";
}

}  // namespace mantissa
