// Refusals of config.json and of models: a table, by the key that has to change.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "architecture_configs.h"

namespace mantissa::architecture_refusals_test {

using nlohmann::json;
using test::config_of;
using test::error_of;
using test::read;
using test::Refusal;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Error refused(const Refusal& refusal) {
  SCOPED_TRACE(text(refusal.type, ' ', refusal.change));
  const Error error = error_of([&] { read(config_of(refusal.type, json::parse(refusal.change))); });
  EXPECT_EQ(error.code(), refusal.code) << error.what();
  EXPECT_THAT(error.what(), HasSubstr(refusal.what));
  EXPECT_THAT(error.what(), StartsWith("config.json: "));
  return error;
}

// Each of these values alone is refused, with a message that begins with its key and continues so; "%V" stands for the value.
void expect_each_refused(const char* types, ExitCode code, const std::string& how) {
  const json by_type = json::parse(types);
  for (const auto& [type, values] : by_type.items()) {
    for (const auto& [key, value] : values.items()) {
      json change;
      change[key] = value;
      const std::string written = change.dump(), found = refused({type.c_str(), written.c_str(), "", code}).what();
      const std::string rest = how == "%V" ? " = " + value.dump() : how;
      EXPECT_THAT(found, StartsWith("config.json: " + key + rest)) << type;
    }
  }
}

// A reader of the message has the file, not a configuration of a run.
TEST(ArchitectureRefusals, LimitsAreToldInTheWordsOfTheFile) {
  expect_each_refused(R"({
      "llama": {"num_attention_heads": 0, "hidden_size": -96},
      "mixtral": {"num_local_experts": 0},
      "qwen3_moe": {"intermediate_size": 0, "moe_intermediate_size": 0},
      "gpt_oss": {"sliding_window": 0},
      "gpt2": {"n_head": -4, "n_layer": 0, "n_positions": 0, "n_inner": -1}})",
                      ExitCode::usage, ": must be at least 1, got ");
  // These are refused before anything is done for each layer.
  expect_each_refused(R"({"mixtral": {"num_hidden_layers": 1000000000000000000}, "qwen3_moe": {"num_hidden_layers": 10001},
                          "gpt_oss": {"num_hidden_layers": 1000000000000000000}})",
                      ExitCode::usage, ": must be at most 10000, got 100");
  const std::vector<Refusal> limits = {
      {"llama", R"({"rms_norm_eps": 0})", ": rms_norm_eps: must be positive"},
      {"gpt2", R"({"layer_norm_epsilon": -1})", ": layer_norm_epsilon: must be positive"},
      {"gpt_oss", R"({"swiglu_limit": 0})", ": swiglu_limit: must be positive"},
      {"llama", R"({"vocab_size": 99999999999})", ": vocab_size: must be "},
      {"qwen3_moe", R"({"router_aux_loss_coef": -1})", ": router_aux_loss_coef: must be 0 or more"},
      {"llama", R"({"vocab_size": 0, "rms_norm_eps": -1})", ": 2 errors"},
      {"llama", R"({"vocab_size": 0, "rms_norm_eps": -1})", "\n  vocab_size: must be at least 1, got 0"},
      {"llama", R"({"vocab_size": 0, "rms_norm_eps": -1})", "\n  rms_norm_eps: must be "},
      {"llama", R"({"num_key_value_heads": 3})", ": num_key_value_heads: must divide num_attention_heads 4, got 3"},
      {"qwen2", R"({"num_key_value_heads": "absent"})", "must divide num_attention_heads 4, got 32; the file does not say"},
      {"llama", R"({"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": null})",
       ": hidden_size: must be a multiple of num_attention_heads 5"},
      {"qwen3", R"({"head_dim": 31})", ": head_dim: rotary positions need an even head_dim, got 31"},
      {"mixtral", R"({"num_local_experts": 1})", ": num_experts_per_tok: must be at most num_local_experts 1, got 2"},
      {"qwen3_moe", R"({"num_experts": 1})", ": num_experts_per_tok: must be at most num_experts 1, got 2"},
      {"gpt_oss", R"({"num_experts_per_tok": 1})", ": num_experts_per_tok: with num_experts_per_tok 1"},
      {"gpt2", R"({"n_head": 5})", ": n_embd = 96: must be a multiple of n_head 5"},
      {"llama", R"({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2}})",
       ": rope_theta: must be above 1 for rope_scaling.rope_type yarn"},
      {"llama", R"({"rope_scaling": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}})",
       ": rope_scaling.high_freq_factor: must be above rope_scaling.low_freq_factor 4, got 1"},
      {"llama", R"({"rope_theta": null, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5, "factor": 0.5}})",
       ": rope_parameters.factor: must be at least 1"}};
  for (const Refusal& limit : limits)
    EXPECT_THAT(refused(limit).what(), Not(AnyOf(HasSubstr("model."), HasSubstr(":1:"), HasSubstr("moe."))));
}

TEST(ArchitectureRefusals, WhatMantissaDoesNotComputeIsRefusedByName) {
  expect_each_refused(R"({
      "llama": {"architectures": ["LlamaForSequenceClassification"], "hidden_act": "gelu", "partial_rotary_factor": 0.5,
                "pretraining_tp": 2, "torch_dtype": "float8_e4m3fn", "is_encoder_decoder": true, "add_cross_attention": true,
                "rope_interleaved": true, "is_llama_config": false, "use_qk_norm": true, "qkv_bias": true},
      "qwen2": {"qkv_bias": false, "use_mrope": true},
      "qwen3": {"is_llama_config": true},
      "qwen3_moe": {"use_qk_norm": false, "qkv_bias": true, "shared_expert_intermediate_size": 64, "expert_dtype": "fp4"},
      "mixtral": {"router_jitter_noise": 0.1, "num_experts": 5},
      "gpt_oss": {"swiglu_alpha": 1.5, "attention_bias": false, "layer_types": ["full_attention", "full_attention"],
                  "sliding_window": null, "rope_scaling": {}},
      "gpt2": {"qkv_bias": false, "scale_attn_weights": false, "scale_attn_by_inverse_layer_idx": true, "activation_function": "relu"}})",
                      ExitCode::usage, "%V");
  const std::string sliding = R"("layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 8)",
                    moe = "{" + sliding + R"(, "use_sliding_window": true})", plain = "{" + sliding + "}";
  const std::vector<Refusal> refusals = {
      {"llama", R"({"model_type": "gemma2"})", "model_type \"gemma2\": mantissa knows llama, qwen2"},
      {"llama", R"({"hidden_act": "gelu"})", "hidden_act = \"gelu\": mantissa computes only \"silu\""},
      {"mixtral", R"({"num_experts": 5})", "num_experts = 5: num_local_experts is 6"},
      {"qwen3_moe", R"({"num_experts": 0})", "a qwen3_moe without experts"},
      // Windows that the class does not have.
      {"qwen3", plain.c_str(), "layer_types = "},
      {"mixtral", plain.c_str(), "layer_types = "},
      {"qwen3_moe", moe.c_str(), "layer_types = "},
      {"gpt_oss", R"({"sliding_window": null})", "sliding_window = null: every second layer of gpt-oss has one"},
      // Rotary positions that are unclear.
      {"llama", R"({"rope_parameters": {"partial_rotary_factor": 0.5}})", "rope_parameters.partial_rotary_factor = 0.5"},
      {"llama", R"({"rope_scaling": {"type": "dynamic", "factor": 2.0}})", "rope_scaling.type = \"dynamic\""},
      {"llama", R"({"rope_scaling": {"rope_type": "default", "mystery": 1}})", "rope_scaling.mystery = 1"},
      {"llama", R"({"rope_scaling": {"rope_type": "llama3", "type": "yarn"}})", "rope_scaling.type = \"yarn\": rope_type is \"llama3\""},
      {"gpt_oss", R"({"rope_scaling": null})", "rope_scaling = null: transformers 4 takes this as unscaled and transformers 5 as yarn"},
      {"llama", R"({"rope_theta": 778, "rope_parameters": {"rope_theta": 777}})", "rope_theta differs: 778 stands beside it"},
      {"qwen3", R"({"rope_theta": "absent", "rope_scaling": {"rope_theta": 778}, "rope_parameters": {"rope_theta": 777}})",
       "rope_parameters = "},
      {"llama", R"({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_parameters": {"rope_type": "yarn", "factor": 3}})",
       "rope_scaling says otherwise"},
      {"gpt_oss", R"({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_parameters": {"rope_type": "default"}})",
       "rope_parameters = "},
      // Codes of experts.
      {"qwen3_moe", R"({"expert_dtype": "fp4"})", "expert_dtype = \"fp4\": there is no quantization_config"},
      {"qwen3_moe", R"({"expert_dtype": "fp4", "quantization_config": {"quant_method": "mxfp4"}})", "it is of quant_method fp8"},
      {"qwen3_moe", R"({"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"}})", "mantissa reads expert_dtype beside it"},
      {"qwen3", R"({"expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8"}})", "expert_dtype = \"fp4\""}};
  for (const Refusal& refusal : refusals) refused(refusal);
}

TEST(ArchitectureRefusals, WhatIsOfAnotherTypeOrMissingIsDamage) {
  // null, where the class has no None, among others.
  expect_each_refused(R"({
      "llama": {"vocab_size": "259", "hidden_size": 1.5, "num_hidden_layers": 18446744073709551615, "rope_theta": "big",
                "rope_parameters": [1], "rope_scaling": [1], "max_position_embeddings": null},
      "qwen2": {"head_dim": null},
      "qwen3": {"head_dim": null, "rms_norm_eps": null},
      "qwen3_moe": {"head_dim": null, "num_key_value_heads": null, "mlp_only_layers": [1, 18446744073709551615]},
      "mixtral": {"num_local_experts": null, "num_experts": null}})",
                      ExitCode::data, " must be a");
  const std::vector<Refusal> refusals = {
      {"llama", R"({"vocab_size": "259"})", "vocab_size must be an integer, got \"259\"", ExitCode::data},
      {"llama", R"({"tie_word_embeddings": 1})", "tie_word_embeddings must be true or false", ExitCode::data},
      {"qwen3", R"({"attention_bias": null})", "attention_bias must be true or false", ExitCode::data},
      {"llama", R"({"hidden_size": null})", "hidden_size is missing", ExitCode::data},
      {"qwen3_moe", R"({"mlp_only_layers": [1, 0.5]})", "mlp_only_layers must be a list of integers", ExitCode::data},
      {"qwen3_moe", R"({"expert_dtype": 4, "quantization_config": {"quant_method": "fp8"}})", "expert_dtype must be", ExitCode::data},
      {"qwen2", R"({"use_sliding_window": true, "max_window_layers": null})", "max_window_layers must be an integer", ExitCode::data},
      {"llama", R"({"rope_scaling": {"type": "yarn"}})", "rope_scaling.factor is missing", ExitCode::data},
      {"llama", R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4}})", "low_freq_factor is missing",
       ExitCode::data},
      {"llama", R"({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}})", "high_freq_factor is missing",
       ExitCode::data}};
  for (const Refusal& refusal : refusals) refused(refusal);
}

// A model that no architecture has, with every reason.
TEST(ArchitectureRefusals, OptionsOfAnotherArchitectureAreRefusedByName) {
  struct Option {
    const char* type;
    void (*set)(ModelConfig& model);
    const char* what;
  };
  const std::vector<Option> options = {
      {"llama", [](ModelConfig& m) { m.sliding_window = 4; }, "model.sliding_window: Llama has none"},
      {"gpt2", [](ModelConfig& m) { m.sliding_window = 4; }, "model.sliding_window: "},
      {"llama", [](ModelConfig& m) { m.attention_sinks = true; }, "model.attention_sinks: only gpt-oss has them"},
      {"mixtral", [](ModelConfig& m) { m.attention_sinks = true; }, "model.attention_sinks: "},
      {"gpt2", [](ModelConfig& m) { m.attention_sinks = true; }, "model.attention_sinks: "},
      {"llama", [](ModelConfig& m) { m.activation = Activation::swiglu_clamped; },
       "of which gpt-oss is the nearest:\n  model.attention_bias must be all\n  model.attention_sinks must be true"},
      {"mixtral", [](ModelConfig& m) { m.activation = Activation::swiglu_clamped; }, "model.attention_sinks must be true"},
      {"llama", [](ModelConfig& m) { m.norm = Norm::layer; }, "model.position must be learned"},
      {"llama", [](ModelConfig& m) { m.hidden_size = 98; }, "model.num_attention_heads: transformers refuses"},
      {"qwen3", [](ModelConfig& m) { m.mlp_bias = true; }, "model.mlp_bias: only Llama has it"},
      {"qwen3_moe", [](ModelConfig& m) { m.attention_bias = AttentionBias::qkv; }, "model.attention_bias: qkv"},
      {"qwen3_moe", [](ModelConfig& m) { m.sliding_window = 4, m.sliding_layers = {1}; },
       "model.sliding_layers: Mixtral and Qwen3-MoE have windows in all layers or none"},
      {"qwen3_moe", [](ModelConfig& m) { m.moe->n_group = 2; }, "model.moe.n_group"},
      {"qwen3_moe", [](ModelConfig& m) { m.moe->force_balance = true; }, "model.moe.force_balance"},
      {"qwen3_moe", [](ModelConfig& m) { m.moe->bias_update_rate = 0.1; }, "model.moe.bias_update_rate"},
      {"qwen3_moe", [](ModelConfig& m) { m.moe->score = RouterScore::sigmoid; }, "model.moe.score"},
      {"qwen3_moe", [](ModelConfig& m) { m.moe->shared_intermediate_size = 32, m.moe->routed_scaling_factor = 2.0; },
       "model.moe.shared_intermediate_size"},
      {"qwen3_moe", [](ModelConfig& m) { m.moe->shared_intermediate_size = 32, m.moe->routed_scaling_factor = 2.0; },
       "model.moe.routed_scaling_factor"},
      {"mixtral", [](ModelConfig& m) { m.moe->norm_topk_prob = false; }, "model.moe.norm_topk_prob"},
      {"mixtral", [](ModelConfig& m) { m.moe->router_bias = true; }, "model.moe.router_bias: only gpt-oss"},
      {"mixtral", [](ModelConfig& m) { m.moe->expert_mlp_bias = true; }, "model.moe.expert_mlp_bias: only gpt-oss"},
      {"mixtral", [](ModelConfig& m) { m.moe->dense_layers = {1}; }, "model.moe.dense_layers: Mixtral"},
      {"mixtral", [](ModelConfig& m) { m.attention_bias = AttentionBias::all; }, "Mixtral has none"},
      {"gpt2", [](ModelConfig& m) { m.mlp_bias = false; }, "model.mlp_bias"},
      {"gpt2", [](ModelConfig& m) { m.num_key_value_heads = 2; }, "model.num_key_value_heads must be"},
      {"gpt2", [](ModelConfig& m) { m.head_dim = 32; }, "model.head_dim must be"},
      {"gpt_oss", [](ModelConfig& m) { m.moe->router_bias = false; }, "model.moe.router_bias must be true"},
      {"gpt_oss", [](ModelConfig& m) { m.moe->dense_layers = {1}; }, "model.moe.dense_layers: every layer"},
      {"gpt_oss", [](ModelConfig& m) { m.moe.reset(); }, "model.moe: every layer has experts"},
      {"gpt_oss", [](ModelConfig& m) { m.moe->norm_topk_prob = m.moe->softmax_after_topk = false; },
       "model.moe.norm_topk_prob must be true"}};
  for (const auto& [type, set, what] : options) {
    SCOPED_TRACE(text(type, ' ', what));
    ModelConfig model = read(config_of(type)).model;
    EXPECT_NO_THROW(architecture_of(model)) << "of its own architecture";
    set(model);
    const Error error = error_of([&] { architecture_of(model); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(what));
  }
}

}  // namespace mantissa::architecture_refusals_test
