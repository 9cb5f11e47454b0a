#include "mantissa/models/model_shape.h"

namespace mantissa {
namespace {

ModuleShape column_parallel(const std::string& path, int64_t out, int64_t in, bool bias, std::vector<ModulePart> parts = {}) {
  return {.path = path, .out = out, .in = in, .bias = bias ? out : 0, .parts = std::move(parts), .split = Split::column_parallel};
}

ModuleShape row_parallel(const std::string& path, ModuleRole role, int64_t out, int64_t in, bool bias) {
  return {.path = path, .role = role, .out = out, .in = in, .bias = bias ? out : 0, .split = Split::row_parallel};
}

ModuleShape norm(const std::string& path, int64_t channels, bool bias, ModuleRole role = ModuleRole::other) {
  return {.path = path, .kind = ModuleKind::norm, .role = role, .out = channels, .bias = bias ? channels : 0};
}

void add_attention(const ModelConfig& config, int64_t layer, const std::string& path, std::vector<ModuleShape>& modules) {
  const int64_t q = config.num_attention_heads * config.head_size(), kv = config.kv_heads() * config.head_size();
  const bool qkv_bias = config.attention_bias != AttentionBias::none, out_bias = config.attention_bias == AttentionBias::all;
  modules.push_back(column_parallel(path + ".qkv", q + 2 * kv, config.hidden_size, qkv_bias, {{"q", q}, {"k", kv}, {"v", kv}}));
  modules.push_back(row_parallel(path + ".out", ModuleRole::attention_output, config.hidden_size, q, out_bias));
  modules.back().window = config.window(layer);
  if (config.qk_norm) {
    modules.push_back(norm(path + ".q_norm", config.head_size(), false, ModuleRole::head_norm));
    modules.push_back(norm(path + ".k_norm", config.head_size(), false, ModuleRole::head_norm));
  }
  if (!config.attention_sinks) return;
  modules.push_back(
      {.path = path + ".sinks", .kind = ModuleKind::sinks, .out = config.num_attention_heads, .split = Split::column_parallel});
}

void add_mlp(const ModelConfig& config, const std::string& path, std::vector<ModuleShape>& modules) {
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  if (config.gated()) {
    modules.push_back(column_parallel(path + ".gate_up", 2 * inner, hidden, config.mlp_bias, {{"gate", inner}, {"up", inner}}));
  } else {
    modules.push_back(column_parallel(path + ".up", inner, hidden, config.mlp_bias));
  }
  modules.push_back(row_parallel(path + ".down", ModuleRole::mlp_output, hidden, inner, config.mlp_bias));
}

void add_moe(const ModelConfig& config, const std::string& path, std::vector<ModuleShape>& modules) {
  const MoeConfig& moe = *config.moe;
  const int64_t hidden = config.hidden_size, inner = moe.intermediate_size, shared = moe.shared_intermediate_size;
  modules.push_back({.path = path + ".router",
                     .kind = ModuleKind::router,
                     .out = moe.num_experts,
                     .in = hidden,
                     .bias = moe.router_bias ? moe.num_experts : 0,
                     .buffer_name = path + ".expert_bias",
                     .buffer = moe.has_expert_bias() ? moe.num_experts : 0});
  const auto add_experts = [&](ModuleShape one) {
    one.experts = true;
    one.matrices = moe.num_experts;
    one.bias *= moe.num_experts;
    one.active = moe.num_experts_per_tok;
    modules.push_back(std::move(one));
  };
  add_experts(column_parallel(path + ".experts.gate_up", 2 * inner, hidden, moe.expert_mlp_bias, {{"gate", inner}, {"up", inner}}));
  add_experts(row_parallel(path + ".experts.down", ModuleRole::mlp_output, hidden, inner, moe.expert_mlp_bias));
  if (shared == 0) return;
  modules.push_back(column_parallel(path + ".shared.gate_up", 2 * shared, hidden, false, {{"gate", shared}, {"up", shared}}));
  modules.push_back(row_parallel(path + ".shared.down", ModuleRole::mlp_output, hidden, shared, false));
}

}  // namespace

ModelShape model_shape(const ModelConfig& config, int64_t tensor) {
  const int64_t hidden = config.hidden_size, vocab = config.vocab_size ? config.padded_vocab_size() : 0;
  const int64_t padding = vocab - config.vocab_size.value_or(0);
  std::vector<ModuleShape> modules = {
      {.path = "embed", .kind = ModuleKind::embedding, .out = vocab, .in = hidden, .padding = padding, .split = Split::column_parallel}};
  if (config.position == Position::learned) {
    modules.push_back({.path = "position", .kind = ModuleKind::embedding, .out = config.max_position_embeddings, .in = hidden});
  }
  for (int64_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = text("layers.", i);
    modules.push_back(norm(layer + ".attn_norm", hidden, config.norm_bias));
    add_attention(config, i, layer + ".attn", modules);
    modules.push_back(norm(layer + ".mlp_norm", hidden, config.norm_bias));
    config.has_experts(i) ? add_moe(config, layer + ".moe", modules) : add_mlp(config, layer + ".mlp", modules);
  }
  modules.push_back(norm("final_norm", hidden, config.norm_bias));
  if (!config.tie_word_embeddings) {
    modules.push_back(
        {.path = "output", .kind = ModuleKind::output, .out = vocab, .in = hidden, .padding = padding, .split = Split::column_parallel});
  }
  return {.modules = std::move(modules),
          .tied_embeddings = config.tie_word_embeddings,
          .fp32_logits = config.logits_dtype == LogitsDtype::fp32,
          .tensor = tensor};
}

std::vector<ParameterShape> parameter_shapes(const ModelShape& model) {
  std::vector<ParameterShape> shapes;
  for (const ModuleShape& module : model.modules) {
    const Shape padded = module.in == 0 ? Shape{module.out} : Shape{module.rows(), module.in};
    shapes.push_back({.name = module.weight_name(), .shape = padded.with_dim0(module.rows() - module.padding), .padded = padded});
    if (module.bias > 0) shapes.push_back({.name = module.bias_name(), .shape = {module.bias}, .padded = {module.bias}});
  }
  return shapes;
}

std::vector<ParameterShape> buffer_shapes(const ModelShape& model) {
  std::vector<ParameterShape> shapes;
  for (const ModuleShape& module : model.modules) {
    if (module.buffer == 0) continue;
    shapes.push_back({.name = module.buffer_name, .shape = {module.buffer}, .padded = {module.buffer}});
  }
  return shapes;
}

double attention_flops_per_token(const ModuleShape& module, int64_t seq_len) {
  if (module.role != ModuleRole::attention_output) return 0.0;
  const auto heads = static_cast<double>(module.in), length = static_cast<double>(seq_len), window = static_cast<double>(module.window);
  if (module.window == 0 || module.window >= seq_len) return 6.0 * heads * length;
  return 12.0 * heads * window * (1.0 - window / (2.0 * length));
}

double training_flops_per_token(const ModelShape& model, int64_t seq_len) {
  int64_t multiplied = 0;
  double attention = 0.0;
  for (const ModuleShape& module : model.modules) {
    const bool projects = module.kind == ModuleKind::output || (model.tied_embeddings && module.path == "embed");
    const bool multiplies = projects || module.kind == ModuleKind::linear || module.kind == ModuleKind::router;
    if (multiplies) multiplied += module.active_elements();
    attention += attention_flops_per_token(module, seq_len);
  }
  return 6.0 * static_cast<double>(multiplied) + attention;
}

}  // namespace mantissa
