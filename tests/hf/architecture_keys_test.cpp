// Keys of config.json: absent ones, those of published files, and limits.
#include <gmock/gmock.h>

#include <array>
#include <nlohmann/json.hpp>

#include "architecture_configs.h"

namespace mantissa::architecture_keys_test {

using nlohmann::json;
using test::config_of;
using test::read;
using test::Refusal;
using test::refused;
using ::testing::HasSubstr;

// What the configuration classes of transformers 4.57 and 5.23 have where the file is silent.
TEST(ArchitectureKeys, AbsentKeysAreThoseOfTheClass) {
  struct OfClass {
    const char* type;
    int64_t kv_heads, head_size, positions;
    double norm_eps, theta;
  };
  for (const OfClass& of_class : {OfClass{"llama", 32, 64, 2048, 1e-6, 1e4}, OfClass{"qwen2", 32, 64, 32768, 1e-6, 1e4},
                                  OfClass{"qwen3", 32, 128, 32768, 1e-6, 1e4}, OfClass{"qwen3_moe", 4, 64, 32768, 1e-6, 1e4},
                                  OfClass{"mixtral", 8, 64, 131072, 1e-5, 1e6}, OfClass{"gpt_oss", 8, 64, 131072, 1e-5, 150000}}) {
    const json config = {{"model_type", of_class.type}, {"vocab_size", 259},      {"hidden_size", 2048},
                         {"intermediate_size", 160},    {"num_hidden_layers", 3}, {"num_attention_heads", 32}};
    SCOPED_TRACE(of_class.type);
    const ArchitectureConfig architecture = read(config);
    const ModelConfig& model = architecture.model;
    EXPECT_EQ(model.kv_heads(), of_class.kv_heads);
    EXPECT_EQ(model.head_size(), of_class.head_size);
    EXPECT_EQ(model.max_position_embeddings, of_class.positions);
    EXPECT_EQ(model.norm_eps, of_class.norm_eps);
    EXPECT_EQ(model.rope_theta, of_class.theta);
    EXPECT_EQ(model.rope_scaling.has_value(), of_class.type == std::string("gpt_oss"));
    EXPECT_FALSE(model.tie_word_embeddings);
    EXPECT_EQ(architecture.dtype, Dtype::f32);
    EXPECT_FALSE(architecture.says_dtype);
    const std::string bias = choice_name(model.attention_bias);
    EXPECT_EQ(bias, architecture.architecture == Architecture::qwen2     ? "qkv"
                    : architecture.architecture == Architecture::gpt_oss ? "all"
                                                                         : "none");
    EXPECT_FALSE(model.mlp_bias);
  }
  const auto experts = [](const char* type) {
    json config = config_of(type);
    for (const char* key : {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers"})
      config.erase(key);
    const MoeConfig moe = *read(config).model.moe;
    return std::array{moe.num_experts, moe.num_experts_per_tok, moe.intermediate_size};
  };
  EXPECT_EQ(experts("mixtral"), (std::array<int64_t, 3>{8, 2, 160}));
  EXPECT_EQ(experts("qwen3_moe"), (std::array<int64_t, 3>{128, 8, 768}));
  EXPECT_EQ(experts("gpt_oss"), (std::array<int64_t, 3>{128, 4, 160}));
  const RopeScalingConfig yarn = *read(config_of("gpt_oss")).model.rope_scaling;
  EXPECT_EQ(yarn.type, RopeScaling::yarn);
  EXPECT_EQ(yarn.factor, 32.0);
  EXPECT_EQ(yarn.original_max_position_embeddings, 4096);
  EXPECT_EQ(yarn.truncate, false);
  const ModelConfig gpt2 = read({{"model_type", "gpt2"}, {"vocab_size", 259}, {"n_embd", 96}, {"n_layer", 2}, {"n_head", 4}}).model;
  EXPECT_EQ(gpt2.max_position_embeddings, 1024);
  EXPECT_EQ(gpt2.norm_eps, 1e-5);
  EXPECT_EQ(gpt2.activation, Activation::gelu_tanh);
}

// null is what a class has as None, which is not always what it has without the key.
TEST(ArchitectureKeys, NullIsNotAbsent) {
  const auto with = [](const char* type, const json& change) {
    json config = config_of(type);
    config.update(change);
    return config;
  };
  for (const char* type : {"llama", "qwen2", "qwen3", "mixtral", "gpt_oss"})
    EXPECT_EQ(read(with(type, {{"num_key_value_heads", nullptr}})).model.kv_heads(), 4) << type;
  for (const char* type : {"llama", "mixtral", "gpt_oss"})
    EXPECT_EQ(read(with(type, {{"head_dim", nullptr}})).model.head_size(), 24) << type;
  for (const auto& [type, theta] : std::vector<std::pair<const char*, double>>{{"llama", 1e4}, {"mixtral", 1e6}, {"gpt_oss", 150000.0}})
    EXPECT_EQ(read(with(type, {{"rope_theta", nullptr}})).model.rope_theta, theta) << type;
  const json window = {{"use_sliding_window", true}, {"sliding_window", nullptr}, {"max_window_layers", 0}};
  EXPECT_FALSE(read(with("qwen3", window)).model.sliding_window.has_value());
  json absent = with("qwen3", window);
  absent.erase("sliding_window");
  EXPECT_EQ(read(absent).model.sliding_window, 4096);
  for (const auto& [type, key] : std::vector<std::pair<const char*, const char*>>{{"qwen3_moe", "num_key_value_heads"},
                                                                                  {"qwen3", "head_dim"},
                                                                                  {"qwen2", "head_dim"},
                                                                                  {"qwen3_moe", "head_dim"},
                                                                                  {"llama", "max_position_embeddings"},
                                                                                  {"qwen3", "rms_norm_eps"},
                                                                                  {"qwen3", "attention_bias"},
                                                                                  {"mixtral", "num_local_experts"},
                                                                                  {"mixtral", "num_experts"}}) {
    const Error error = refused(with(type, {{key, nullptr}}));
    EXPECT_EQ(error.code(), ExitCode::data) << type;
    EXPECT_THAT(error.what(), HasSubstr(text("config.json: ", key, " must be "))) << type;
  }
}

// Whoever reads the message has the file, not a configuration of a run.
TEST(ArchitectureKeys, LimitsAreToldInTheWordsOfTheFile) {
  const std::vector<Refusal> refusals = {
      {"llama", {{"num_attention_heads", 0}}, "config.json: num_attention_heads: must be at least 1"},
      {"llama", {{"hidden_size", -96}}, "config.json: hidden_size: must be at least 1"},
      {"llama", {{"rms_norm_eps", 0}}, "config.json: rms_norm_eps: must be positive"},
      {"llama", {{"vocab_size", 99999999999}}, "config.json: vocab_size: must be "},
      {"llama", {{"num_key_value_heads", 3}}, "config.json: num_key_value_heads: must divide num_attention_heads 4, got 3"},
      {"llama",
       {{"num_attention_heads", 5}, {"num_key_value_heads", 1}, {"head_dim", nullptr}},
       "config.json: hidden_size: must be a multiple of num_attention_heads 5"},
      {"qwen3", {{"head_dim", 31}}, "config.json: head_dim: rotary positions need an even head_dim, got 31"},
      {"mixtral", {{"num_local_experts", 1}}, "config.json: num_experts_per_tok: must be at most num_local_experts 1, got 2"},
      {"mixtral", {{"num_local_experts", 0}}, "config.json: num_local_experts: must be at least 1"},
      {"qwen3_moe", {{"intermediate_size", 0}}, "config.json: intermediate_size: must be at least 1"},
      {"qwen3_moe", {{"moe_intermediate_size", 0}}, "config.json: moe_intermediate_size: must be at least 1"},
      {"qwen3_moe", {{"num_experts", 1}}, "config.json: num_experts_per_tok: must be at most num_experts 1, got 2"},
      {"qwen3_moe", {{"router_aux_loss_coef", -1}}, "config.json: router_aux_loss_coef: must be 0 or more"},
      {"gpt_oss", {{"num_experts_per_tok", 1}}, "config.json: num_experts_per_tok: with num_experts_per_tok 1"},
      {"gpt_oss", {{"swiglu_limit", 0}}, "config.json: swiglu_limit: must be positive"},
      {"gpt_oss", {{"sliding_window", 0}}, "config.json: sliding_window: must be at least 1"},
      {"llama",
       {{"rope_theta", 1}, {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2}}}},
       "config.json: rope_theta: must be above 1 for rope_scaling.rope_type yarn"},
      {"llama",
       {{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 2}, {"low_freq_factor", 4}, {"high_freq_factor", 1}}}},
       "config.json: rope_scaling.high_freq_factor: must be above rope_scaling.low_freq_factor 4, got 1"},
      {"llama",
       {{"rope_theta", nullptr}, {"rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 5}, {"factor", 0.5}}}},
       "config.json: rope_parameters.factor: must be at least 1"},
      {"gpt2", {{"n_head", 5}}, "config.json: n_embd = 96: must be a multiple of n_head 5"},
      {"gpt2", {{"n_head", -4}}, "config.json: n_head: must be at least 1"},
      {"gpt2", {{"n_layer", 0}}, "config.json: n_layer: must be at least 1"},
      {"gpt2", {{"n_positions", 0}}, "config.json: n_positions: must be at least 1"},
      {"gpt2", {{"n_inner", -1}}, "config.json: n_inner: must be at least 1"},
      {"gpt2", {{"layer_norm_epsilon", -1}}, "config.json: layer_norm_epsilon: must be positive"}};
  for (const Refusal& refusal : refusals) {
    json config = config_of(refusal.type);
    config.update(refusal.change);
    const Error error = refused(config);
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(refusal.what));
    EXPECT_THAT(error.what(), ::testing::Not(::testing::AnyOf(HasSubstr("model."), HasSubstr(":1:"), HasSubstr("moe.")))) << refusal.type;
  }
  json both = config_of("llama");
  both.update({{"vocab_size", 0}, {"num_hidden_layers", 0}});
  both["num_hidden_layers"] = 3;
  both["rms_norm_eps"] = -1;
  EXPECT_THAT(refused(both).what(),
              ::testing::AllOf(HasSubstr("config.json: 2 errors"), HasSubstr("\n  vocab_size: must be at least 1, got 0"),
                               HasSubstr("\n  rms_norm_eps: must be ")));
  json silent = config_of("qwen2");
  silent.erase("num_key_value_heads");
  EXPECT_THAT(refused(silent).what(), HasSubstr("num_key_value_heads: must divide num_attention_heads 4, got 32; the file does not say"));
}

// transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters.
TEST(ArchitectureKeys, BothFormsOfRotaryPositionsAreRead) {
  const json scaling = {{"rope_type", "yarn"}, {"factor", 2.0}, {"original_max_position_embeddings", 32}};
  json within = scaling;
  within["rope_theta"] = 777.0;
  for (const char* type : {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"}) {
    json four = config_of(type), five = config_of(type), plain = config_of(type);
    four.update({{"rope_theta", 777.0}, {"rope_scaling", scaling}});
    five.erase("rope_theta");
    five["rope_parameters"] = within;
    const std::string read_four = effective_config(read(four).model);
    EXPECT_EQ(effective_config(read(five).model), read_four);
    json both = four;
    both["rope_parameters"] = within;
    EXPECT_EQ(effective_config(read(both).model), read_four);
    EXPECT_THAT(read_four, HasSubstr("\"rope_theta\": 777"));
    both["rope_theta"] = 778.0;
    EXPECT_THAT(refused(both).what(), HasSubstr("rope_theta differs: 778 stands beside it"));
    both.erase("rope_theta");
    both["rope_scaling"]["rope_theta"] = 778.0;
    EXPECT_THAT(refused(both).what(), HasSubstr("rope_parameters = "));
    EXPECT_THAT(refused(both).what(), HasSubstr("rope_theta differs: 778 stands beside it"));
    both["rope_scaling"].erase("rope_theta");
    both["rope_theta"] = 777.0;
    both["rope_parameters"]["factor"] = 3.0;
    EXPECT_THAT(refused(both).what(), HasSubstr("rope_scaling says otherwise"));
    both["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 777.0}};
    EXPECT_THAT(refused(both).what(), HasSubstr("rope_scaling says otherwise"));
    plain["rope_parameters"] = {{"rope_theta", plain["rope_theta"]}};
    EXPECT_FALSE(read(plain).model.rope_scaling.has_value());
  }
}

TEST(ArchitectureKeys, PositionsAreWrittenWithTheirTypeFirst) {
  const std::string written = architecture_config(read(config_of("gpt_oss")).model, Dtype::bf16, {});
  size_t at = written.find("\"rope_scaling\"");
  for (const char* const key : {"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}) {
    const size_t next = written.find(text('"', key, "\":"), at);
    ASSERT_NE(next, std::string::npos) << key << " in " << written.substr(at);
    at = next;
  }
}

TEST(ArchitectureKeys, WhatIsLackingOrUnclearInPositionsIsRefusedByName) {
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8}};
  const auto scaled = [&](const char* type, const json& scaling) {
    json config = config_of(type);
    config["rope_scaling"] = scaling;
    return config;
  };
  EXPECT_EQ(read(scaled("llama", llama3)).model.rope_scaling->original_max_position_embeddings, 8);
  for (const char* key : {"factor", "low_freq_factor", "high_freq_factor"}) {
    json without = llama3;
    without.erase(key);
    EXPECT_THAT(refused(scaled("llama", without)).what(), HasSubstr(text("rope_scaling.", key, " is missing")));
  }
  EXPECT_THAT(refused(scaled("llama", {{"type", "yarn"}})).what(), HasSubstr("rope_scaling.factor is missing"));
  json length = llama3;
  length.erase("original_max_position_embeddings");
  EXPECT_EQ(read(scaled("llama", length)).model.rope_scaling->original_max_position_embeddings, 64);
  json named_twice = llama3;
  named_twice["type"] = "yarn";
  EXPECT_THAT(refused(scaled("llama", named_twice)).what(), HasSubstr("rope_scaling.type = \"yarn\": rope_type is \"llama3\""));
  for (const json& nothing : {json(nullptr), json::object()})
    EXPECT_THAT(refused(scaled("gpt_oss", nothing)).what(), HasSubstr("rope_scaling = ")) << nothing;
  EXPECT_FALSE(read(scaled("gpt_oss", {{"rope_type", "default"}})).model.rope_scaling.has_value());
}

TEST(ArchitectureKeys, WindowsThatTheClassDoesNotHaveAreRefused) {
  const auto with = [](const char* type, const json& change) {
    json config = config_of(type);
    config.update(change);
    return config;
  };
  const json types = {"sliding_attention", "full_attention", "full_attention"};
  const std::vector<Refusal> refusals = {
      {"qwen3", {{"layer_types", types}, {"sliding_window", 8}}, "layer_types = "},  // not used
      {"mixtral", {{"layer_types", types}, {"sliding_window", 8}}, "layer_types = "},
      {"qwen3_moe", {{"layer_types", types}, {"sliding_window", 8}, {"use_sliding_window", true}}, "layer_types = "},
      {"gpt_oss", {{"sliding_window", nullptr}}, "sliding_window = null: every second layer"},
      {"qwen2", {{"use_sliding_window", true}, {"max_window_layers", nullptr}}, "max_window_layers must be an integer"},
      {"mixtral", {{"num_experts", 5}}, "num_experts = 5: num_local_experts is 6"}};
  for (const Refusal& refusal : refusals) EXPECT_THAT(refused(with(refusal.type, refusal.change)).what(), HasSubstr(refusal.what));
  const json alike = {"full_attention", "full_attention", "full_attention"};
  EXPECT_FALSE(read(with("mixtral", {{"layer_types", alike}})).model.sliding_window.has_value());
}

// The keys of published files, with small numbers: every key is known, and the options are those of the architecture.
TEST(ArchitectureKeys, PublishedFilesAreRead) {
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

// Keys that are neutral by the value that published files have.
// DeepSeek-V4 has the key beside quantization_config.
TEST(ArchitectureKeys, ExpertDtypeIsAPartOfWhatSaysHowWeightsArePacked) {
  const json fp8 = {{"quant_method", "fp8"}};
  json config = config_of("qwen3_moe");
  config.update({{"expert_dtype", "fp4"}, {"quantization_config", fp8}});
  const ArchitectureConfig found = read(config);
  EXPECT_EQ(json::parse(found.quantization), json({{"quant_method", "fp8"}, {"expert_dtype", "fp4"}}));
  const json written = json::parse(architecture_config(found.model, Dtype::bf16, {}, found.quantization));
  EXPECT_EQ(written["expert_dtype"], "fp4");
  EXPECT_EQ(written["quantization_config"], fp8);
  const auto with = [&](const std::string& type, const json& expert_dtype, const json& quantization) {
    json other = config_of(type);
    other.update({{"expert_dtype", expert_dtype}, {"quantization_config", quantization}});
    return other;
  };
  EXPECT_EQ(refused(with("qwen3_moe", 4, fp8)).code(), ExitCode::data);
  EXPECT_THAT(refused(with("qwen3_moe", "fp4", nullptr)).what(), HasSubstr("expert_dtype = \"fp4\": there is no quantization_config"));
  const json inside = {{"quant_method", "fp8"}, {"expert_dtype", "fp4"}};
  for (const json& beside : {json("fp4"), json()})
    EXPECT_THAT(refused(with("qwen3_moe", beside, inside)).what(), HasSubstr("mantissa reads expert_dtype beside it"));
  EXPECT_THAT(refused(with("qwen3", "fp4", fp8)).what(), HasSubstr("expert_dtype = \"fp4\""));  // as any key of no meaning to it
}

TEST(ArchitectureKeys, WhatIsNoOptionOfTheClassMustBeAsItIs) {
  const std::vector<Refusal> refusals = {{"qwen2", {{"use_mrope", true}}, "use_mrope = true: mantissa computes only false"},
                                         {"llama", {{"rope_interleaved", true}}, "rope_interleaved = true"},
                                         {"llama", {{"is_llama_config", false}}, "is_llama_config = false"},
                                         {"qwen3", {{"is_llama_config", true}}, "is_llama_config = true"},
                                         {"llama", {{"use_qk_norm", true}}, "use_qk_norm = true"},
                                         {"qwen2", {{"qkv_bias", false}}, "qkv_bias = false"},
                                         {"gpt2", {{"qkv_bias", false}}, "qkv_bias = false"},
                                         {"llama", {{"qkv_bias", true}}, "qkv_bias = true"},
                                         {"qwen3_moe", {{"use_qk_norm", false}}, "use_qk_norm = false"},
                                         {"qwen3_moe", {{"qkv_bias", true}}, "qkv_bias = true"},
                                         {"qwen3_moe", {{"shared_expert_intermediate_size", 64}}, "shared_expert_intermediate_size = 64"}};
  for (const Refusal& refusal : refusals) {
    json config = config_of(refusal.type);
    config.update(refusal.change);
    EXPECT_EQ(refused(config).code(), ExitCode::usage);
    EXPECT_THAT(refused(config).what(), HasSubstr(refusal.what));
  }
}

TEST(ArchitectureKeys, WhatChangesNothingIsAccepted) {
  json dense = config_of("qwen3_moe");
  dense.update({{"mlp_only_layers", {0, 1, 2}}, {"num_experts_per_tok", 0}});
  EXPECT_FALSE(read(dense).model.moe.has_value());
  json rotary = config_of("llama");
  rotary.update({{"partial_rotary_factor", 1}, {"rope_scaling", {{"rope_type", "default"}, {"partial_rotary_factor", 1.0}}}});
  EXPECT_NO_THROW(read(rotary));
}

TEST(ArchitectureKeys, PartsOfTheFileAreToldByTheirName) {
  json config = config_of("qwen3_moe");
  config["rope_scaling"] = {1};
  EXPECT_STREQ(refused(config).what(), "config.json: rope_scaling must be a JSON object");
  config = config_of("qwen3_moe");
  config["mlp_only_layers"] = {1, 18446744073709551615ULL};
  EXPECT_EQ(refused(config).code(), ExitCode::data);
  EXPECT_THAT(refused(config).what(), HasSubstr("mlp_only_layers must be a list of integers"));
}

}  // namespace mantissa::architecture_keys_test
