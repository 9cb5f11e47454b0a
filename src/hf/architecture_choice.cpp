// Finds the architecture of Hugging Face that has the options of a model.
#include "hf/architecture_table.h"

namespace mantissa {
namespace {

// Why a model does not belong to an architecture, as "model.qk_norm must be false".
struct Problems {
  std::vector<std::string> list = {};
  void need(bool holds, const std::string& problem) {
    if (!holds) list.push_back(problem);
  }
};

Architecture nearest_architecture(const ModelConfig& model) {
  if (model.norm == Norm::layer || model.position == Position::learned || !model.gated()) return Architecture::gpt2;
  if (model.activation == Activation::swiglu_clamped) return Architecture::gpt_oss;
  if (model.moe) return model.qk_norm ? Architecture::qwen3_moe : Architecture::mixtral;
  if (model.qk_norm) return Architecture::qwen3;
  return model.attention_bias == AttentionBias::qkv ? Architecture::qwen2 : Architecture::llama;
}

void need_implied(Problems& problems, Architecture architecture, ModelConfig& model) {
  for (const ArchitectureKey& key : architecture_table(architecture)) {
    if (key.kind != KeyKind::implied || (!model.moe && std::string_view(key.option).starts_with("moe."))) continue;
    const Json wanted = json_of(key.value), found = json_of(option_field(model, key.option).get());
    problems.need(found == wanted, text("model.", key.option, " must be ", wanted.is_string() ? wanted.string() : wanted.dump()));
  }
}

void need_experts(Problems& problems, Architecture architecture, const MoeConfig& moe) {
  problems.need(!moe.has_expert_bias(), "model.moe.bias_update_rate: the architecture has no expert biases");
  problems.need(moe.score == RouterScore::softmax, "model.moe.score: the architecture has softmax");
  problems.need(moe.n_group == 1, "model.moe.n_group: the architecture chooses among all experts");
  problems.need(moe.routed_scaling_factor == 1.0, "model.moe.routed_scaling_factor: the architecture has none");
  problems.need(!moe.force_balance, "model.moe.force_balance: the architecture chooses by scores");
  problems.need(moe.shared_intermediate_size == 0, "model.moe.shared_intermediate_size: the architecture has no shared experts");
  if (architecture == Architecture::gpt_oss)
    return problems.need(moe.dense_layers.empty(), "model.moe.dense_layers: every layer has experts");
  problems.need(!moe.router_bias, "model.moe.router_bias: only gpt-oss has it, with model.activation swiglu_clamped");
  problems.need(!moe.expert_mlp_bias, "model.moe.expert_mlp_bias: only gpt-oss has them, with model.activation swiglu_clamped");
  problems.need(architecture == Architecture::qwen3_moe || moe.dense_layers.empty(),
                "model.moe.dense_layers: Mixtral has experts in every layer");
}

void need_gpt2(Problems& problems, const ModelConfig& model) {
  problems.need(!model.sliding_window, "model.sliding_window: GPT-2 has none");
  problems.need(!model.moe, "model.moe: GPT-2 has no experts");
  problems.need(!model.gated(), "model.activation must be a GELU");
  problems.need(model.kv_heads() == model.num_attention_heads, "model.num_key_value_heads must be num_attention_heads");
  problems.need(model.head_size() * model.num_attention_heads == model.hidden_size,
                "model.head_dim must be hidden_size / num_attention_heads");
}

void need_rms(Problems& problems, Architecture architecture, const ModelConfig& model) {
  const bool llama = architecture == Architecture::llama, qkv = model.attention_bias == AttentionBias::qkv;
  problems.need(!qkv || architecture == Architecture::qwen2,
                "model.attention_bias: qkv without one for out is Qwen2's, which has neither qk_norm nor experts");
  problems.need(architecture != Architecture::mixtral || model.attention_bias == AttentionBias::none,
                "model.attention_bias: Mixtral has none");
  problems.need(llama || !model.mlp_bias, "model.mlp_bias: only Llama has it, without qk_norm");
  problems.need(!llama || !model.sliding_window, "model.sliding_window: Llama has none; Qwen3 has, with model.qk_norm");
  problems.need(!model.moe || model.sliding_layers.empty(),
                "model.sliding_layers: Mixtral and Qwen3-MoE have windows in all layers or none");
  problems.need(!llama || model.hidden_size % model.num_attention_heads == 0,
                "model.num_attention_heads: transformers refuses a Llama whose hidden_size is no multiple of it");
}

}  // namespace

Architecture architecture_of(const ModelConfig& given) {
  ModelConfig model = with_derived(given);
  const Architecture architecture = nearest_architecture(model);
  const bool gpt2 = architecture == Architecture::gpt2, gpt_oss = architecture == Architecture::gpt_oss;
  Problems problems;
  need_implied(problems, architecture, model);
  problems.need(gpt_oss || !model.attention_sinks, "model.attention_sinks: only gpt-oss has them, with model.activation swiglu_clamped");
  problems.need(!gpt_oss || model.moe, "model.moe: every layer has experts");
  if (model.moe && !gpt2) need_experts(problems, architecture, *model.moe);
  if (gpt2) need_gpt2(problems, model);
  if (!gpt2 && !gpt_oss) need_rms(problems, architecture, model);
  const char* nearest = gpt2 ? ", of which GPT-2 is the nearest" : gpt_oss ? ", of which gpt-oss is the nearest" : "";
  if (architecture == Architecture::mixtral)
    nearest = ", of which Mixtral is the nearest, the only one with experts and without model.qk_norm";
  require(problems.list.empty(), ExitCode::usage, "no model of Hugging Face has these options", nearest, ":\n  ",
          joined(problems.list, "\n  "));
  return architecture;
}

}  // namespace mantissa
