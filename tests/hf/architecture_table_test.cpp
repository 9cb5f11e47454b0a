// Names and values of each architecture, word for word as transformers has them: export and import go through one map, both ways, so that
// only a table beside it shows a swapped pair.
#include <gmock/gmock.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "architecture_configs.h"
#include "mantissa/base/text.h"
#include "mantissa/checkpoint/checkpoint_manifest.h"
#include "mantissa/hf/hugging_face.h"
#include "testing.h"

namespace mantissa::architecture_table_test {

using nlohmann::json;
using test::config_of;
using test::read;

// Every tensor outside of layers, of the first layer and of its second expert: name, shape, parameter and the first of its rows there.
using Table = std::set<std::string>;

Table with_attention(Table table, int64_t q, int64_t k) {
  const std::string layer = "model.layers.0.", attention = layer + "self_attn.";
  table.insert({"model.embed_tokens.weight [259, 96] embed.weight 0", "model.norm.weight [96] final_norm.weight 0",
                "lm_head.weight [259, 96] output.weight 0", layer + "input_layernorm.weight [96] layers.0.attn_norm.weight 0",
                layer + "post_attention_layernorm.weight [96] layers.0.mlp_norm.weight 0",
                text(attention, "q_proj.weight [", q, ", 96] layers.0.attn.qkv.weight 0"),
                text(attention, "k_proj.weight [", k, ", 96] layers.0.attn.qkv.weight ", q),
                text(attention, "v_proj.weight [", k, ", 96] layers.0.attn.qkv.weight ", q + k),
                text(attention, "o_proj.weight [96, ", q, "] layers.0.attn.out.weight 0")});
  return table;
}

Table with_biases(Table table, int64_t q, int64_t k) {
  const std::string attention = "model.layers.0.self_attn.";
  table.insert({text(attention, "q_proj.bias [", q, "] layers.0.attn.qkv.bias 0"),
                text(attention, "k_proj.bias [", k, "] layers.0.attn.qkv.bias ", q),
                text(attention, "v_proj.bias [", k, "] layers.0.attn.qkv.bias ", q + k)});
  return table;
}

Table with_norms_of_heads(Table table) {
  table.insert({"model.layers.0.self_attn.q_norm.weight [32] layers.0.attn.q_norm.weight 0",
                "model.layers.0.self_attn.k_norm.weight [32] layers.0.attn.k_norm.weight 0"});
  return table;
}

const Table kDense = {"model.layers.0.mlp.gate_proj.weight [160, 96] layers.0.mlp.gate_up.weight 0",
                      "model.layers.0.mlp.up_proj.weight [160, 96] layers.0.mlp.gate_up.weight 160",
                      "model.layers.0.mlp.down_proj.weight [96, 160] layers.0.mlp.down.weight 0"};
const Table kQwenExperts = {"model.layers.0.mlp.gate.weight [6, 96] layers.0.moe.router.weight 0",
                            "model.layers.0.mlp.experts.1.gate_proj.weight [64, 96] layers.0.moe.experts.gate_up.weight 128",
                            "model.layers.0.mlp.experts.1.up_proj.weight [64, 96] layers.0.moe.experts.gate_up.weight 192",
                            "model.layers.0.mlp.experts.1.down_proj.weight [96, 64] layers.0.moe.experts.down.weight 96"};
const Table kMixtralExperts = {"model.layers.0.block_sparse_moe.gate.weight [6, 96] layers.0.moe.router.weight 0",
                               "model.layers.0.block_sparse_moe.experts.1.w1.weight [160, 96] layers.0.moe.experts.gate_up.weight 320",
                               "model.layers.0.block_sparse_moe.experts.1.w3.weight [160, 96] layers.0.moe.experts.gate_up.weight 480",
                               "model.layers.0.block_sparse_moe.experts.1.w2.weight [96, 160] layers.0.moe.experts.down.weight 96"};
const Table kGptOss = {
    "model.layers.0.self_attn.o_proj.bias [96] layers.0.attn.out.bias 0",
    "model.layers.0.self_attn.sinks [4] layers.0.attn.sinks 0",
    "model.layers.0.mlp.router.weight [6, 96] layers.0.moe.router.weight 0",
    "model.layers.0.mlp.router.bias [6] layers.0.moe.router.bias 0",
    "model.layers.0.mlp.experts.gate_up_proj [6, 96, 320] layers.0.moe.experts.gate_up.weight 0 transposed, every second from 0",
    "model.layers.0.mlp.experts.gate_up_proj_bias [6, 320] layers.0.moe.experts.gate_up.bias 0, every second from 0",
    "model.layers.0.mlp.experts.down_proj [6, 160, 96] layers.0.moe.experts.down.weight 0 transposed",
    "model.layers.0.mlp.experts.down_proj_bias [6, 96] layers.0.moe.experts.down.bias 0"};
const Table kGpt2 = {"transformer.wte.weight [259, 96] embed.weight 0",
                     "transformer.wpe.weight [64, 96] position.weight 0",
                     "transformer.ln_f.weight [96] final_norm.weight 0",
                     "transformer.ln_f.bias [96] final_norm.bias 0",
                     "lm_head.weight [259, 96] output.weight 0",
                     "transformer.h.0.ln_1.weight [96] layers.0.attn_norm.weight 0",
                     "transformer.h.0.ln_1.bias [96] layers.0.attn_norm.bias 0",
                     "transformer.h.0.ln_2.weight [96] layers.0.mlp_norm.weight 0",
                     "transformer.h.0.ln_2.bias [96] layers.0.mlp_norm.bias 0",
                     "transformer.h.0.attn.c_attn.weight [96, 288] layers.0.attn.qkv.weight 0 transposed",
                     "transformer.h.0.attn.c_attn.bias [288] layers.0.attn.qkv.bias 0",
                     "transformer.h.0.attn.c_proj.weight [96, 96] layers.0.attn.out.weight 0 transposed",
                     "transformer.h.0.attn.c_proj.bias [96] layers.0.attn.out.bias 0",
                     "transformer.h.0.mlp.c_fc.weight [96, 384] layers.0.mlp.up.weight 0 transposed",
                     "transformer.h.0.mlp.c_fc.bias [384] layers.0.mlp.up.bias 0",
                     "transformer.h.0.mlp.c_proj.weight [384, 96] layers.0.mlp.down.weight 0 transposed",
                     "transformer.h.0.mlp.c_proj.bias [96] layers.0.mlp.down.bias 0"};

Table tensors_of(const std::string& type) {
  json config = config_of(type);
  config["tie_word_embeddings"] = false;
  const ArchitectureConfig architecture = read(config);
  Table out;
  for (const ArchitectureTensor& tensor : architecture_tensors(architecture.architecture, architecture.model)) {
    const bool layer = tensor.parameter.starts_with("layers."), first = tensor.parameter.starts_with("layers.0.");
    const bool stacked = tensor.name.find("experts.") != std::string::npos && tensor.matrices == 1;
    if ((layer && !first) || (stacked && tensor.name.find("experts.1.") == std::string::npos)) continue;
    const RowRun& run = tensor.runs.front();
    const std::string step = run.step == 2 ? text(", every second from ", run.file_row) : "";
    out.insert(text(tensor.name, ' ', shape_text(tensor.shape), ' ', tensor.parameter, ' ', run.row, tensor.transposed ? " transposed" : "",
                    step));
  }
  return out;
}

TEST(ArchitectureTable, TensorsHaveTheNamesOfTransformersForWhatTheyHold) {
  using ::testing::ContainerEq;
  EXPECT_THAT(tensors_of("llama"), ContainerEq(with_attention(kDense, 128, 64)));
  EXPECT_THAT(tensors_of("qwen2"), ContainerEq(with_biases(with_attention(kDense, 96, 48), 96, 48)));
  EXPECT_THAT(tensors_of("qwen3"), ContainerEq(with_norms_of_heads(with_attention(kDense, 128, 64))));
  EXPECT_THAT(tensors_of("qwen3_moe"), ContainerEq(with_norms_of_heads(with_attention(kQwenExperts, 128, 64))));
  EXPECT_THAT(tensors_of("mixtral"), ContainerEq(with_attention(kMixtralExperts, 128, 64)));
  EXPECT_THAT(tensors_of("gpt_oss"), ContainerEq(with_biases(with_attention(kGptOss, 128, 64), 128, 64)));
  EXPECT_THAT(tensors_of("gpt2"), ContainerEq(kGpt2));
}

// What a model of each architecture is written as: these words and numbers, whatever reads them here again.
json written(const std::string& type, const json& change = {}) {
  json config = config_of(type);
  if (!change.is_null()) config.update(change);
  const ArchitectureConfig architecture = read(config);
  return json::parse(architecture_config(architecture.model, architecture.dtype, {}));
}

json rms(const char* type, const char* architecture, const json& more) {
  json out = {{"architectures", {architecture}},
              {"model_type", type},
              {"vocab_size", 259},
              {"hidden_act", "silu"},
              {"hidden_size", 96},
              {"intermediate_size", 160},
              {"num_hidden_layers", 3},
              {"num_attention_heads", 4},
              {"num_key_value_heads", 2},
              {"max_position_embeddings", 64},
              {"rms_norm_eps", 1e-5},
              {"rope_theta", 5e5},
              {"initializer_range", 0.02},
              {"tie_word_embeddings", true},
              {"bos_token_id", nullptr},
              {"eos_token_id", nullptr},
              {"torch_dtype", "bfloat16"}};
  out.update(more);
  return out;
}

TEST(ArchitectureTable, ConfigsHaveTheKeysOfTransformers) {
  const json experts = {{"num_experts_per_tok", 2}, {"router_aux_loss_coef", 0.001}, {"output_router_logits", false}};
  const auto with_experts = [&](json more) {
    more.update(experts);
    return more;
  };
  EXPECT_EQ(written("llama"), rms("llama", "LlamaForCausalLM", {{"head_dim", 32}, {"attention_bias", false}, {"mlp_bias", false}}));
  EXPECT_EQ(written("qwen2"), rms("qwen2", "Qwen2ForCausalLM", {{"use_sliding_window", false}, {"sliding_window", nullptr}}));
  const json qwen3 = {{"head_dim", 32}, {"attention_bias", false}, {"use_sliding_window", false}, {"sliding_window", nullptr}};
  EXPECT_EQ(written("qwen3"), rms("qwen3", "Qwen3ForCausalLM", qwen3));
  json qwen3_moe = with_experts(
      {{"num_experts", 6}, {"moe_intermediate_size", 64}, {"norm_topk_prob", true}, {"decoder_sparse_step", 1}, {"mlp_only_layers", {1}}});
  qwen3_moe.update(qwen3);
  EXPECT_EQ(written("qwen3_moe"), rms("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe));
  EXPECT_EQ(written("mixtral"),
            rms("mixtral", "MixtralForCausalLM", with_experts({{"head_dim", 32}, {"sliding_window", nullptr}, {"num_local_experts", 6}})));
  const json gpt_oss = {{"head_dim", 32},
                        {"attention_bias", true},
                        {"swiglu_limit", 7.0},
                        {"sliding_window", 4},
                        {"layer_types", {"sliding_attention", "full_attention", "sliding_attention"}},
                        {"num_local_experts", 6}};
  json expected = rms("gpt_oss", "GptOssForCausalLM", with_experts(gpt_oss));
  json found = written("gpt_oss");
  expected["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 32.0},    {"beta_fast", 32.0},
                              {"beta_slow", 1.0},    {"truncate", false}, {"original_max_position_embeddings", 4096}};
  EXPECT_EQ(found, expected);
  const json gpt2 = {{"architectures", {"GPT2LMHeadModel"}},
                     {"model_type", "gpt2"},
                     {"vocab_size", 259},
                     {"activation_function", "gelu_new"},
                     {"n_embd", 96},
                     {"n_layer", 2},
                     {"n_head", 4},
                     {"n_inner", 384},
                     {"n_positions", 64},
                     {"n_ctx", 64},
                     {"layer_norm_epsilon", 1e-5},
                     {"initializer_range", 0.02},
                     {"attn_pdrop", 0.0},
                     {"embd_pdrop", 0.0},
                     {"resid_pdrop", 0.0},
                     {"tie_word_embeddings", true},
                     {"bos_token_id", nullptr},
                     {"eos_token_id", nullptr},
                     {"torch_dtype", "float32"}};
  EXPECT_EQ(written("gpt2"), gpt2);
}

TEST(ArchitectureTable, ValuesHaveTheMeaningOfTransformers) {
  const auto activation = [](const char* name) {
    json config = config_of("gpt2");
    config["activation_function"] = name;
    return read(config).model.activation;
  };
  EXPECT_EQ(activation("gelu_new"), Activation::gelu_tanh);
  EXPECT_EQ(activation("gelu_pytorch_tanh"), Activation::gelu_tanh);
  EXPECT_EQ(activation("gelu"), Activation::gelu_erf);
  EXPECT_EQ(written("gpt2", {{"activation_function", "gelu"}})["activation_function"], "gelu");
  for (const char* const type : {"qwen3_moe", "mixtral", "gpt_oss"})
    EXPECT_EQ(written(type, {{"router_aux_loss_coef", 0.25}})["router_aux_loss_coef"], 0.25) << type;
}

TEST(ArchitectureTable, TheNewerNameOfTheTypeComesFirst) {
  json config = config_of("llama");
  config["torch_dtype"] = "bfloat16";
  config["dtype"] = "float32";
  EXPECT_EQ(read(config).dtype, Dtype::f32);
  config["torch_dtype"] = "float32";
  config["dtype"] = "bfloat16";
  EXPECT_EQ(read(config).dtype, Dtype::bf16);
  config.erase("dtype");
  EXPECT_EQ(read(config).dtype, Dtype::f32);
}

}  // namespace mantissa::architecture_table_test
