#include "models/model_shape.h"

namespace mantissa {
namespace {

// A size, and the key of the configuration whose value it is.
struct Width {
  int64_t size;
  const char* key = "";
};

ModuleShape column_parallel(const std::string& path, Width out, Width in, bool bias, std::vector<ModulePart> parts = {}) {
  return {.path = path,
          .out = out.size,
          .in = in.size,
          .bias = bias ? out.size : 0,
          .parts = std::move(parts),
          .split = Split::column_parallel,
          .out_key = out.key,
          .in_key = in.key};
}

ModuleShape gate_up(const std::string& path, Width inner, Width hidden, bool bias) {
  return column_parallel(path, {2 * inner.size}, hidden, bias, {{"gate", inner.size, inner.key}, {"up", inner.size, inner.key}});
}

ModuleShape row_parallel(const std::string& path, ModuleRole role, Width out, Width in, bool bias) {
  return {.path = path,
          .role = role,
          .out = out.size,
          .in = in.size,
          .bias = bias ? out.size : 0,
          .split = Split::row_parallel,
          .out_key = out.key,
          .in_key = in.key};
}

Width hidden_of(const ModelConfig& config) { return {config.hidden_size, "model.hidden_size"}; }

ModuleShape norm(const std::string& path, int64_t channels, bool bias, ModuleRole role = ModuleRole::other) {
  return {.path = path, .kind = ModuleKind::norm, .role = role, .out = channels, .bias = bias ? channels : 0};
}

void add_attention(const ModelConfig& config, int64_t layer, const std::string& path, std::vector<ModuleShape>& modules) {
  const int64_t q = config.num_attention_heads * config.head_size(), kv = config.kv_heads() * config.head_size();
  const bool qkv_bias = config.attention_bias != AttentionBias::none, out_bias = config.attention_bias == AttentionBias::all;
  const Width hidden = hidden_of(config), heads{q, config.head_dim ? "" : hidden.key};
  modules.push_back(column_parallel(path + ".qkv", {q + 2 * kv}, hidden, qkv_bias, {{"q", q, heads.key}, {"k", kv}, {"v", kv}}));
  modules.push_back(row_parallel(path + ".out", ModuleRole::attention_output, hidden, heads, out_bias));
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
  const Width hidden = hidden_of(config), inner{config.intermediate_size, "model.intermediate_size"};
  modules.push_back(config.gated() ? gate_up(path + ".gate_up", inner, hidden, config.mlp_bias)
                                   : column_parallel(path + ".up", inner, hidden, config.mlp_bias));
  modules.push_back(row_parallel(path + ".down", ModuleRole::mlp_output, hidden, inner, config.mlp_bias));
}

void add_moe(const ModelConfig& config, const std::string& path, std::vector<ModuleShape>& modules) {
  const MoeConfig& moe = *config.moe;
  const Width hidden = hidden_of(config), inner{moe.intermediate_size, "model.moe.intermediate_size"},
              shared{moe.shared_intermediate_size, "model.moe.shared_intermediate_size"};
  modules.push_back({.path = path + ".router",
                     .kind = ModuleKind::router,
                     .out = moe.num_experts,
                     .in = hidden.size,
                     .bias = moe.router_bias ? moe.num_experts : 0,
                     .buffer_name = path + ".expert_bias",
                     .buffer = moe.has_expert_bias() ? moe.num_experts : 0,
                     .out_key = "model.moe.num_experts",
                     .in_key = hidden.key});
  const auto add_experts = [&](ModuleShape one) {
    one.experts = true;
    one.matrices = moe.num_experts;
    one.bias *= moe.num_experts;
    one.active = moe.num_experts_per_tok;
    modules.push_back(std::move(one));
  };
  add_experts(gate_up(path + ".experts.gate_up", inner, hidden, moe.expert_mlp_bias));
  add_experts(row_parallel(path + ".experts.down", ModuleRole::mlp_output, hidden, inner, moe.expert_mlp_bias));
  if (shared.size == 0) return;
  modules.push_back(gate_up(path + ".shared.gate_up", shared, hidden, false));
  modules.push_back(row_parallel(path + ".shared.down", ModuleRole::mlp_output, hidden, shared, false));
}

}  // namespace

ModelShape model_shape(const ModelConfig& config, int64_t tensor) {
  const int64_t hidden = config.hidden_size, vocab = config.vocab_size ? config.padded_vocab_size() : 0;
  const int64_t padding = vocab - config.vocab_size.value_or(0);
  std::vector<ModuleShape> modules = {{.path = "embed",
                                       .kind = ModuleKind::embedding,
                                       .out = vocab,
                                       .in = hidden,
                                       .padding = padding,
                                       .split = Split::column_parallel,
                                       .projects = config.tie_word_embeddings,
                                       .in_key = hidden_of(config).key}};
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
  const auto length = static_cast<double>(seq_len);
  return 3.0 * attention_flops(static_cast<double>(module.in), length, static_cast<double>(module.window)) / length;
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
