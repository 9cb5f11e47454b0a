// Names and values of each architecture, word for word as transformers has them: export and import go through one map, both ways, so that
// only a table beside it shows a swapped pair.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <set>

#include "architecture_configs.h"
#include "checkpoint/checkpoint_manifest.h"
#include "mantissa/base/text.h"
#include "models/model_shape.h"
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

// A model of each architecture is written with these words and numbers, whatever reads them here again.
TEST(ArchitectureTable, ConfigsHaveTheKeysOfTransformers) {
  const json rms = json::parse(R"({"vocab_size": 259, "hidden_act": "silu", "hidden_size": 96, "intermediate_size": 160,
      "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
      "rope_theta": 5e5, "initializer_range": 0.02, "tie_word_embeddings": true, "bos_token_id": null, "eos_token_id": null,
      "torch_dtype": "bfloat16"})"),
             experts = json::parse(R"({"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "output_router_logits": false})"),
             qwen = json::parse(R"({"use_sliding_window": false, "sliding_window": null})");
  const auto expect_written = [](const char* type, std::vector<json> parts, const char* own) {
    json expected = json::parse(own);
    for (const json& part : parts) expected.update(part);
    const ArchitectureConfig config = read(config_of(type));
    EXPECT_EQ(json::parse(architecture_config(config.model, config.dtype, {})), expected) << type;
  };
  expect_written("llama", {rms}, R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 32, "attention_bias": false,
      "mlp_bias": false})");
  expect_written("qwen2", {rms, qwen}, R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})");
  expect_written("qwen3", {rms, qwen}, R"({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32,
      "attention_bias": false})");
  expect_written("qwen3_moe", {rms, qwen, experts}, R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
      "head_dim": 32, "attention_bias": false, "num_experts": 6, "moe_intermediate_size": 64, "norm_topk_prob": true,
      "decoder_sparse_step": 1, "mlp_only_layers": [1]})");
  expect_written("mixtral", {rms, experts}, R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "head_dim": 32,
      "sliding_window": null, "num_local_experts": 6})");
  expect_written("gpt_oss", {rms, experts}, R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 32,
      "attention_bias": true, "swiglu_limit": 7.0, "sliding_window": 4, "num_local_experts": 6,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_scaling": {"rope_type": "yarn", "factor": 32.0,
      "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false, "original_max_position_embeddings": 4096}})");
  expect_written("gpt2", {}, R"({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 259,
      "activation_function": "gelu_new", "n_embd": 96, "n_layer": 2, "n_head": 4, "n_inner": 384, "n_positions": 64, "n_ctx": 64,
      "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
      "tie_word_embeddings": true, "bos_token_id": null, "eos_token_id": null, "torch_dtype": "float32"})");
}

// The keys of published files, with small numbers: every key is known, and the options are those of the architecture.
TEST(ArchitectureTable, PublishedFilesAreRead) {
  const std::string run = R"("use_cache":true,"bos_token_id":1,"eos_token_id":2,"initializer_range":0.02,"transformers_version":"4.46.0",)",
                    sizes = run + R"("vocab_size":259,"hidden_size":96,"intermediate_size":160,"num_hidden_layers":2,"hidden_act":"silu",
    "num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64,"rms_norm_eps":1e-06,"tie_word_embeddings":false,)",
                    gpt2 = run + R"("model_type":"gpt2","architectures":["GPT2LMHeadModel"],"activation_function":"gelu_new",
    "attn_pdrop":0.1,"embd_pdrop":0.1,"resid_pdrop":0.1,"layer_norm_epsilon":1e-05,"n_ctx":64,"n_embd":96,"n_head":4,"n_layer":2,
    "n_positions":64,"summary_activation":null,"summary_first_dropout":0.1,"summary_proj_to_labels":true,"summary_type":"cls_index",
    "summary_use_proj":true,"task_specific_params":{"text-generation":{"do_sample":true,"max_length":50}},"vocab_size":259)",
                    llama = R"("model_type":"llama","architectures":["LlamaForCausalLM"],"pretraining_tp":1,"torch_dtype":"bfloat16",)",
                    qwen = R"("attention_dropout":0.0,"use_sliding_window":false,"max_window_layers":28,"torch_dtype":"bfloat16",)",
                    moe = qwen + R"("model_type":"qwen3_moe","architectures":["Qwen3MoeForCausalLM"],"attention_bias":false,"head_dim":32,
    "decoder_sparse_step":1,"mlp_only_layers":[],"moe_intermediate_size":64,"norm_topk_prob":true,"num_experts":6,"num_experts_per_tok":2,
    "output_router_logits":false,"rope_scaling":null,"rope_theta":1000000.0,"router_aux_loss_coef":0.001,"sliding_window":null)";
  const std::vector<std::pair<const char*, std::string>> files = {
      {"Llama 2", sizes + llama + R"("_name_or_path":"x","max_length":4096,"pad_token_id":0,"rope_scaling":null)"},
      {"Llama 3.2", sizes + llama + R"("attention_bias":false,"attention_dropout":0.0,"mlp_bias":false,"head_dim":24,"rope_theta":500000.0,
        "rope_scaling":{"factor":32.0,"high_freq_factor":4.0,"low_freq_factor":1.0,"original_max_position_embeddings":8,
        "rope_type":"llama3"})"},
      {"SmolLM2", sizes + llama + R"("is_llama_config":true,"rope_interleaved":false,"rope_scaling":null,"rope_theta":130000,
        "transformers.js_config":{"kv_cache_dtype":{"fp16":"float16","q4f16":"float16"}}, "attention_bias":false,"mlp_bias":false)"},
      {"Qwen2.5", sizes + qwen + R"("model_type":"qwen2","architectures":["Qwen2ForCausalLM"],"sliding_window":131072,"use_mrope":false,
        "rope_theta":1000000.0,"_attn_implementation_autoset":true)"},
      {"Qwen3", sizes + qwen + R"("model_type":"qwen3","architectures":["Qwen3ForCausalLM"],"attention_bias":false,"head_dim":32,
        "rope_scaling":null,"rope_theta":1000000,"sliding_window":null)"},
      {"Qwen3-30B-A3B", sizes + moe},
      {"Qwen3-Coder-30B-A3B", sizes + moe + R"(,"qkv_bias":false,"shared_expert_intermediate_size":0,"use_qk_norm":true)"},
      {"Mixtral", sizes + R"("model_type":"mixtral","architectures":["MixtralForCausalLM"],"attention_dropout":0.0,"num_local_experts":6,
        "num_experts_per_tok":2,"output_router_logits":false,"rope_theta":1000000.0,"router_aux_loss_coef":0.02,"sliding_window":null,
        "router_jitter_noise":0.0,"torch_dtype":"bfloat16")"},
      {"gpt-oss", sizes + R"("model_type":"gpt_oss","architectures":["GptOssForCausalLM"],"attention_bias":true,"attention_dropout":0.0,
        "experts_per_token":2,"head_dim":32,"initial_context_length":32,"layer_types":["sliding_attention","full_attention"],
        "num_experts_per_tok":2,"num_local_experts":6,"output_router_logits":false,"pad_token_id":3,"quantization_config":{
        "modules_to_not_convert":["model.layers.*.self_attn","model.layers.*.mlp.router","model.embed_tokens","lm_head"],
        "quant_method":"mxfp4"},"rope_scaling":{"beta_fast":32.0,"beta_slow":1.0,"factor":32.0,"original_max_position_embeddings":32,
        "rope_type":"yarn","truncate":false},"rope_theta":150000,"router_aux_loss_coef":0.9,"sliding_window":128,"swiglu_limit":7.0)"},
      {"GPT-2", gpt2},
      {"GPT-2 XL", gpt2 + R"(,"n_special":0,"predict_special_tokens":true,"output_past":true)"},
      {"DistilGPT2", gpt2 + R"(,"_num_labels":1,"id2label":{"0":"LABEL_0"},"label2id":{"LABEL_0":0})"}};
  for (const auto& [name, keys] : files) {
    SCOPED_TRACE(name);
    EXPECT_NO_THROW(EXPECT_EQ(read(json::parse("{" + keys + "}")).model.vocab_size, 259));
  }
}

// Rows of all tensors of a parameter are its rows, once each. Of gate and up of gpt-oss, which stand one below the other here, the file has
// the rows in turn.
void expect_tiles(const ModelConfig& model, ExportFormat format) {
  const std::vector<ArchitectureTensor> tensors = architecture_tensors(architecture_of(model), model, format);
  std::set<std::string> names;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) {
    std::vector<int> seen(static_cast<size_t>(parameter.shape[0]));
    for (const ArchitectureTensor& tensor : tensors) {
      if (tensor.parameter != parameter.name) continue;
      EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
      EXPECT_EQ(tensor.columns(), parameter.shape.with_dim0(1).elements()) << tensor.name;
      for (const RowRun& run : tensor.runs) {
        const int64_t twice = model.moe ? 2 * model.moe->intermediate_size : 0;
        if (tensor.runs.size() > 1 && tensor.name.find(".attn_") != std::string::npos) {  // pairs of a head one below the other
          const int64_t head = model.head_size();
          EXPECT_EQ(run.step, 2) << tensor.name;
          EXPECT_EQ(run.file_row % head, (run.row - tensor.runs.front().row) % head / (head / 2)) << tensor.name;
        } else if (tensor.runs.size() > 1 && format == ExportFormat::hf) {
          EXPECT_EQ(run.step, 2) << tensor.name;
          EXPECT_EQ(run.file_row, run.row / twice * twice + run.row % twice / (twice / 2)) << tensor.name;
        } else if (tensor.runs.size() > 1) {  // experts one below the other: of each, gate or up
          const bool up = tensor.name.find(".up_proj.") != std::string::npos || tensor.name.find("ffn_up_exps") != std::string::npos;
          const int64_t first = up ? twice / 2 : 0;
          EXPECT_EQ(run.row, run.file_row / (twice / 2) * twice + first) << tensor.name;
          EXPECT_EQ(run.step, 1) << tensor.name;
        }
        for (int64_t row = 0; row < run.rows; ++row) {
          ++seen.at(static_cast<size_t>(run.row + row));
          EXPECT_LT(run.file_row + row * run.step, tensor.rows());
        }
      }
    }
    EXPECT_THAT(seen, ::testing::Each(1)) << parameter.name;
  }
  EXPECT_EQ(names.size(), tensors.size());
}

TEST(ArchitectureTable, TensorsTileTheParameters) {
  for (const char* type : test::kArchitectureTypes) {
    SCOPED_TRACE(type);
    for (const ExportFormat format : {ExportFormat::hf, ExportFormat::mlx, ExportFormat::gguf})
      expect_tiles(read(config_of(type)).model, format);
  }
}

TEST(ArchitectureTable, BuffersAndPrefixesAreThoseOfOlderFiles) {
  for (const char* name : {"transformer.h.0.attn.bias", "h.0.attn.masked_bias"}) {
    EXPECT_TRUE(is_architecture_buffer(Architecture::gpt2, name)) << name;
    EXPECT_FALSE(is_architecture_buffer(Architecture::llama, name)) << name;
  }
  EXPECT_TRUE(is_architecture_buffer(Architecture::llama, "model.layers.0.self_attn.rotary_emb.inv_freq"));
  EXPECT_FALSE(is_architecture_buffer(Architecture::gpt2, "transformer.h.0.attn.c_attn.bias"));
  EXPECT_EQ(with_base_prefix(Architecture::gpt2, "h.0.ln_1.weight"), "transformer.h.0.ln_1.weight");
  EXPECT_EQ(with_base_prefix(Architecture::llama, "norm.weight"), "model.norm.weight");
  EXPECT_EQ(with_base_prefix(Architecture::gpt2, "h.0.ln_1.weight", ExportFormat::mlx), "model.h.0.ln_1.weight");
  for (const char* whole : {"lm_head.weight", "model.norm.weight"}) EXPECT_EQ(with_base_prefix(Architecture::llama, whole), whole);
}

}  // namespace mantissa::architecture_table_test
