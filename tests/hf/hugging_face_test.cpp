// config.json and tensor names of the architectures: what is read, what is written, and what is refused by which name.
#include "mantissa/hf/hugging_face.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "architecture_configs.h"
#include "files.h"
#include "mantissa/models/model_shape.h"
#include "testing.h"

namespace mantissa::hugging_face_test {

using nlohmann::json;
using test::config_of;
using test::read;
using test::Refusal;
using test::refused;
using ::testing::HasSubstr;

class Architectures : public ::testing::TestWithParam<const char*> {};

TEST_P(Architectures, AConfigThatIsWrittenIsReadAgain) {
  const ArchitectureConfig first = read(config_of(GetParam()));
  EXPECT_EQ(architecture_of(first.model), first.architecture);
  const std::string written = architecture_config(first.model, first.dtype, {.begin = {1}, .end = {2, 3}, .pad = {}});
  const ArchitectureConfig again = read_architecture_config(written, "written");
  EXPECT_EQ(again.architecture, first.architecture);
  EXPECT_EQ(again.dtype, first.dtype);
  EXPECT_EQ(effective_config(again.model), effective_config(first.model));
  EXPECT_EQ(read_special_tokens(written, "written").end, (std::vector<int64_t>{2, 3}));
}

TEST_P(Architectures, EveryKeyThatChangesTheModelIsReadOrRefused) {
  const json original = config_of(GetParam());
  json config = original;
  const std::string before = effective_config(read(config).model);
  for (const auto& [key, value] : original.items()) {
    if (!value.is_number_integer()) continue;
    config[key] = value.get<int64_t>() * 2;
    EXPECT_NE(effective_config(read(config).model), before) << key;
    config[key] = value;
  }
  for (const char* key : {"attn_logit_softcapping", "clip_qkv", "mystery"}) {
    config[key] = 1;
    const Error error = refused(config);
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr(text(key, " = 1")));
    config.erase(key);
  }
}

// Rows of all tensors of a parameter are its rows, once each.
TEST_P(Architectures, TensorsTileTheParameters) {
  const ModelConfig model = read(config_of(GetParam())).model;
  const std::vector<ArchitectureTensor> tensors = architecture_tensors(architecture_of(model), model);
  std::set<std::string> names;
  for (const ParameterShape& parameter : parameter_shapes(model_shape(model))) {
    std::vector<int> seen(static_cast<size_t>(parameter.shape[0]));
    for (const ArchitectureTensor& tensor : tensors) {
      if (tensor.parameter != parameter.name) continue;
      EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
      EXPECT_EQ(tensor.columns(), parameter.shape.with_dim0(1).elements()) << tensor.name;
      for (const RowRun& run : tensor.runs) {
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

INSTANTIATE_TEST_SUITE_P(All, Architectures, ::testing::Values("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gpt_oss"),
                         [](const auto& one) { return std::string(one.param); });

TEST(HuggingFaceConfig, WhatModelsAreCalledElsewhereIsTheSameHere) {
  const ModelConfig moe = read(config_of("qwen3_moe")).model;
  EXPECT_TRUE(moe.qk_norm);
  EXPECT_EQ(moe.moe->dense_layers, std::vector<int64_t>{1});
  EXPECT_EQ(moe.moe->intermediate_size, 64);
  json stepped = config_of("qwen3_moe");
  stepped["decoder_sparse_step"] = 2;
  EXPECT_FALSE(read(stepped).model.moe.has_value());
  stepped["mlp_only_layers"] = json::array();
  EXPECT_EQ(read(stepped).model.moe->dense_layers, (std::vector<int64_t>{0, 2}));
  stepped.erase("norm_topk_prob");
  EXPECT_FALSE(*read(stepped).model.moe->norm_topk_prob);  // the default of this architecture
  const ModelConfig gpt2 = read(config_of("gpt2")).model;
  EXPECT_EQ(gpt2.intermediate_size, 4 * 96);
  EXPECT_TRUE(gpt2.tie_word_embeddings);
  json newer = config_of("llama");
  newer.erase("rope_theta");
  newer.erase("torch_dtype");
  newer["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 12345.0}};
  newer["dtype"] = "float16";
  EXPECT_EQ(read(newer).model.rope_theta, 12345.0);
  EXPECT_EQ(read(newer).dtype, Dtype::f32);
}

TEST(HuggingFaceConfig, ScaledRotaryFrequenciesAreWrittenAsTheyWereRead) {
  json llama = config_of("llama");
  llama["rope_scaling"] = {{"rope_type", "llama3"},
                           {"factor", 4.0},
                           {"low_freq_factor", 1.5},
                           {"high_freq_factor", 3.0},
                           {"original_max_position_embeddings", 32}};
  json yarn = config_of("qwen3");
  yarn.erase("rope_theta");
  yarn["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 777.0},      {"beta_fast", 16.0},
                             {"truncate", false},   {"attention_factor", 1.25}, {"original_max_position_embeddings", 16},
                             {"factor", nullptr}};
  for (const json& config : {llama, yarn}) {
    const ModelConfig model = read(config).model;
    ASSERT_TRUE(model.rope_scaling.has_value());
    EXPECT_EQ(model.rope_scaling->factor, 4.0);  // of yarn what is longer than the original
    const ArchitectureConfig again = read_architecture_config(architecture_config(model, Dtype::f32, {}), "written");
    EXPECT_EQ(effective_config(again.model), effective_config(model));
  }
  EXPECT_EQ(read(yarn).model.rope_scaling->attention_factor, 1.25);
  EXPECT_EQ(read(yarn).model.rope_theta, 777.0);
}

TEST(HuggingFaceConfig, WhatMantissaDoesNotComputeIsRefusedByName) {
  const std::vector<Refusal> refusals = {
      {"llama", {{"model_type", "gemma2"}}, "model_type \"gemma2\": mantissa knows llama, qwen2"},
      {"llama", {{"architectures", {"LlamaForSequenceClassification"}}}, "architectures = [\"LlamaForSequenceClassification\"]"},
      {"llama", {{"hidden_act", "gelu"}}, "hidden_act = \"gelu\": mantissa computes only \"silu\""},
      {"llama", {{"partial_rotary_factor", 0.5}}, "partial_rotary_factor = 0.5"},
      {"llama", {{"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}}, "rope_scaling.type = \"dynamic\""},
      {"llama", {{"pretraining_tp", 2}}, "pretraining_tp = 2"},
      {"llama", {{"torch_dtype", "float8_e4m3fn"}}, "torch_dtype = \"float8_e4m3fn\""},
      {"llama", {{"num_key_value_heads", 3}}, "num_key_value_heads"},
      {"llama", {{"head_dim", 31}}, "head_dim"},
      {"mixtral", {{"router_jitter_noise", 0.1}}, "router_jitter_noise = 0.1"},
      {"qwen3_moe", {{"num_experts", 0}}, "a qwen3_moe without experts"},
      {"gpt_oss", {{"rope_scaling", nullptr}}, "rope_scaling = null: transformers 4 takes this as unscaled and transformers 5 as yarn"},
      {"gpt_oss", {{"sliding_window", nullptr}}, "sliding_window = null: every second layer of gpt-oss has one"},
      {"llama", {{"is_encoder_decoder", true}}, "is_encoder_decoder = true"},
      {"llama", {{"add_cross_attention", true}}, "add_cross_attention = true"},
      {"llama", {{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}, "rope_parameters.partial_rotary_factor = 0.5"},
      {"llama", {{"rope_scaling", {{"rope_type", "default"}, {"mystery", 1}}}}, "rope_scaling.mystery = 1"},
      {"gpt_oss", {{"swiglu_alpha", 1.5}}, "swiglu_alpha = 1.5"},
      {"gpt_oss", {{"attention_bias", false}}, "attention_bias = false"},
      {"gpt_oss", {{"layer_types", {"full_attention", "full_attention"}}}, "layer_types = "},
      {"gpt2", {{"scale_attn_weights", false}}, "scale_attn_weights = false"},
      {"gpt2", {{"scale_attn_by_inverse_layer_idx", true}}, "scale_attn_by_inverse_layer_idx = true"},
      {"gpt2", {{"activation_function", "relu"}}, "activation_function = \"relu\""}};
  for (const Refusal& refusal : refusals) {
    json config = config_of(refusal.type);
    config.update(refusal.change);
    const Error error = refused(config);
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(refusal.what));
  }
}

TEST(HuggingFaceConfig, LayersBeyondNumberAreRefusedBeforeAnythingIsDoneForEach) {
  for (const char* type : {"mixtral", "qwen3_moe", "gpt_oss"}) {
    json config = config_of(type);
    config.update({{"num_hidden_layers", 1000000000000000000}, {"sliding_window", 8}});
    if (type == std::string("gpt_oss")) config["layer_types"] = {"full_attention"};
    EXPECT_EQ(refused(config).code(), ExitCode::usage);
    EXPECT_THAT(refused(config).what(), HasSubstr("num_hidden_layers: must be at most 10000, got 1000000000000000000"));
  }
}

TEST(HuggingFaceConfig, HeadsOfQwen2MayHaveAnotherSize) {
  json config = config_of("qwen2");
  config["head_dim"] = 32;
  const ModelConfig model = read(config).model;
  EXPECT_EQ(read_architecture_config(architecture_config(model, Dtype::f32, {}), "written").model.head_size(), 32);
}

TEST(HuggingFaceConfig, WhatIsNoConfigIsDamage) {
  for (const json& config : {json::array(), json("text"), json(5)}) EXPECT_EQ(refused(config).code(), ExitCode::data);
  for (const char* text : {"", "{", "{\"model_type\":\"llama\",\"model_type\":\"llama\"}", "{\"a\":NaN}", "\xff"})
    EXPECT_EQ(test::error_of([&] { read_architecture_config(text, "config.json"); }).code(), ExitCode::data) << text;
  const std::vector<json> wrong = {{{"vocab_size", "259"}},   {{"hidden_size", 1.5}},       {{"hidden_size", nullptr}},
                                   {{"rope_theta", "big"}},   {{"tie_word_embeddings", 1}}, {{"hidden_size", 18446744073709551615ULL}},
                                   {{"rope_parameters", {1}}}};
  for (const json& change : wrong) {
    json config = config_of("llama");
    config.update(change);
    const Error error = refused(config);
    EXPECT_EQ(error.code(), ExitCode::data) << error.what();
    EXPECT_THAT(error.what(), HasSubstr(change.items().begin().key()));
  }
}

TEST(HuggingFaceConfig, AModelThatNoArchitectureHasIsRefusedWithEveryReason) {
  ModelConfig model = read(config_of("qwen3_moe")).model;
  model.moe->score = RouterScore::sigmoid;
  model.moe->shared_intermediate_size = 32;
  model.moe->routed_scaling_factor = 2.0;
  const Error error = test::error_of([&] { architecture_of(model); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  for (const char* key : {"model.moe.score", "model.moe.shared_intermediate_size", "model.moe.routed_scaling_factor"})
    EXPECT_THAT(error.what(), HasSubstr(key));
  ModelConfig mixtral = read(config_of("mixtral")).model;
  mixtral.moe->norm_topk_prob = false;
  EXPECT_THAT(test::error_of([&] { architecture_of(mixtral); }).what(), HasSubstr("model.moe.norm_topk_prob"));
  ModelConfig gpt2 = read(config_of("gpt2")).model;
  gpt2.mlp_bias = false;
  EXPECT_THAT(test::error_of([&] { architecture_of(gpt2); }).what(), HasSubstr("model.mlp_bias"));
  ModelConfig layered = read(config_of("llama")).model;
  layered.norm = Norm::layer;
  EXPECT_THAT(test::error_of([&] { architecture_of(layered); }).what(), HasSubstr("model.position must be learned"));
}

TEST(HuggingFaceConfig, OptionsOfAnotherArchitectureAreRefusedByName) {
  const auto refused_with = [](const char* type, auto set) {
    ModelConfig model = read(config_of(type)).model;
    EXPECT_NO_THROW(architecture_of(model)) << "of its own architecture";
    set(model);
    const Error error = test::error_of([&] { architecture_of(model); });
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    return std::string(error.what());
  };
  for (const char* type : {"llama", "gpt2"})
    EXPECT_THAT(refused_with(type, [](ModelConfig& m) { m.sliding_window = 4; }), HasSubstr("model.sliding_window: "));
  for (const char* type : {"llama", "mixtral", "gpt2"}) {
    EXPECT_THAT(refused_with(type, [](ModelConfig& m) { m.attention_sinks = true; }),
                HasSubstr("model.attention_sinks: only gpt-oss has them"));
  }
  for (const char* type : {"llama", "mixtral"})
    EXPECT_THAT(refused_with(type, [](ModelConfig& m) { m.activation = Activation::swiglu_clamped; }),
                HasSubstr("of which gpt-oss is the nearest:\n  model.attention_bias must be all\n  model.attention_sinks must be true"));
  EXPECT_THAT(refused_with("mixtral", [](ModelConfig& m) { m.moe->router_bias = true; }), HasSubstr("model.moe.router_bias: only gpt-oss"));
  EXPECT_THAT(refused_with("mixtral", [](ModelConfig& m) { m.moe->expert_mlp_bias = true; }),
              HasSubstr("model.moe.expert_mlp_bias: only gpt-oss"));
  EXPECT_THAT(refused_with("gpt_oss", [](ModelConfig& m) { m.moe->router_bias = false; }), HasSubstr("model.moe.router_bias must be true"));
  EXPECT_THAT(refused_with("qwen3_moe",
                           [](ModelConfig& m) {
                             m.sliding_window = 4;
                             m.sliding_layers = {1};
                           }),
              HasSubstr("model.sliding_layers: Mixtral and Qwen3-MoE have windows in all layers or none"));
}

TEST(HuggingFaceConfig, EveryOptionThatAnArchitectureLacksHasItsReason) {
  const auto reason = [](const char* type, auto set) {
    ModelConfig model = read(config_of(type)).model;
    EXPECT_NO_THROW(architecture_of(model)) << "of its own architecture";
    set(model);
    const Error error = test::error_of([&] { architecture_of(model); });
    EXPECT_EQ(error.code(), ExitCode::usage) << error.what();
    return std::string(error.what());
  };
  EXPECT_THAT(reason("qwen3_moe", [](ModelConfig& m) { m.moe->n_group = 2; }), HasSubstr("model.moe.n_group"));
  EXPECT_THAT(reason("qwen3_moe", [](ModelConfig& m) { m.moe->force_balance = true; }), HasSubstr("model.moe.force_balance"));
  EXPECT_THAT(reason("qwen3_moe", [](ModelConfig& m) { m.moe->bias_update_rate = 0.1; }), HasSubstr("model.moe.bias_update_rate"));
  EXPECT_THAT(reason("qwen3_moe", [](ModelConfig& m) { m.attention_bias = AttentionBias::qkv; }), HasSubstr("model.attention_bias: qkv"));
  EXPECT_THAT(reason("qwen3", [](ModelConfig& m) { m.mlp_bias = true; }), HasSubstr("model.mlp_bias: only Llama has it"));
  EXPECT_THAT(reason("mixtral", [](ModelConfig& m) { m.moe->dense_layers = {1}; }), HasSubstr("model.moe.dense_layers: Mixtral"));
  EXPECT_THAT(reason("mixtral", [](ModelConfig& m) { m.attention_bias = AttentionBias::all; }), HasSubstr("Mixtral has none"));
  EXPECT_THAT(reason("llama", [](ModelConfig& m) { m.hidden_size = 98; }), HasSubstr("model.num_attention_heads: transformers refuses"));
  EXPECT_THAT(reason("gpt2", [](ModelConfig& m) { m.num_key_value_heads = 2; }), HasSubstr("model.num_key_value_heads must be"));
  EXPECT_THAT(reason("gpt2", [](ModelConfig& m) { m.head_dim = 32; }), HasSubstr("model.head_dim must be"));
  EXPECT_THAT(reason("gpt_oss", [](ModelConfig& m) { m.moe->dense_layers = {1}; }), HasSubstr("model.moe.dense_layers: every layer"));
  EXPECT_THAT(reason("gpt_oss", [](ModelConfig& m) { m.moe.reset(); }), HasSubstr("model.moe: every layer has experts"));
  EXPECT_THAT(reason("gpt_oss", [](ModelConfig& m) { m.moe->norm_topk_prob = m.moe->softmax_after_topk = false; }),
              HasSubstr("model.moe.norm_topk_prob must be true"));
}

// What a reader would take for something else if it were left out or written as usual.
TEST(HuggingFaceConfig, UnusualValuesAreReadAndWritten) {
  const auto again = [](const char* type, const json& change) {
    json config = config_of(type);
    config.update(change);
    const ModelConfig model = read(config).model;
    EXPECT_EQ(effective_config(read_architecture_config(architecture_config(model, Dtype::f32, {}), "written").model),
              effective_config(model))
        << type;
    return model;
  };
  EXPECT_EQ(again("gpt2", {{"activation_function", "gelu"}}).activation, Activation::gelu_erf);
  EXPECT_EQ(again("gpt2", {{"n_inner", 100}}).intermediate_size, 100);
  EXPECT_TRUE(again("llama", {{"mlp_bias", true}}).mlp_bias);
  EXPECT_EQ(again("qwen3", {{"attention_bias", true}}).attention_bias, AttentionBias::all);
  EXPECT_EQ(again("qwen3", {{"head_dim", 24}}).head_size(), 24);
  EXPECT_EQ(again("qwen3_moe", {{"norm_topk_prob", false}}).moe->norm_topk_prob, false);
  EXPECT_FALSE(again("gpt_oss", {{"rope_scaling", {{"rope_type", "default"}}}}).rope_scaling.has_value());
  EXPECT_TRUE(again("llama", {{"mystery", nullptr}}).gated());  // unknown, but nothing
  json windows = config_of("qwen3");
  windows.update({{"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 1}});
  const json written = json::parse(architecture_config(read(windows).model, Dtype::f32, {}));
  EXPECT_EQ(written["max_window_layers"], 0);  // for readers that look at nothing else
  const SpecialTokens tokens = read_special_tokens(R"({"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 7})", "config.json");
  EXPECT_EQ(tokens.pad, std::vector<int64_t>{7});
  for (const char* ids : {R"("x")", R"([1, "x"])", "1.5", "[[1]]", "{}", "18446744073709551615", "[1, 18446744073709551615]"}) {
    const Error error = test::error_of([&] { read_special_tokens(text(R"({"eos_token_id": )", ids, "}"), "a/config.json"); });
    EXPECT_EQ(error.code(), ExitCode::data) << ids;
    EXPECT_THAT(error.what(), ::testing::StartsWith("a/config.json: eos_token_id")) << ids;
  }
}

TEST(HuggingFaceTensors, BuffersAndPrefixesAreThoseOfOlderFiles) {
  for (const char* name : {"transformer.h.0.attn.bias", "h.0.attn.masked_bias"}) {
    EXPECT_TRUE(is_architecture_buffer(Architecture::gpt2, name)) << name;
    EXPECT_FALSE(is_architecture_buffer(Architecture::llama, name)) << name;
  }
  EXPECT_TRUE(is_architecture_buffer(Architecture::llama, "model.layers.0.self_attn.rotary_emb.inv_freq"));
  EXPECT_FALSE(is_architecture_buffer(Architecture::gpt2, "transformer.h.0.attn.c_attn.bias"));
  EXPECT_EQ(with_base_prefix(Architecture::gpt2, "h.0.ln_1.weight"), "transformer.h.0.ln_1.weight");
  EXPECT_EQ(with_base_prefix(Architecture::llama, "norm.weight"), "model.norm.weight");
  for (const char* whole : {"lm_head.weight", "model.norm.weight"}) EXPECT_EQ(with_base_prefix(Architecture::llama, whole), whole);
}

// Even columns of the file are gate, odd ones up, which stand one below the other here.
TEST(HuggingFaceTensors, GateAndUpOfGptOssAlternate) {
  const ModelConfig model = read(config_of("gpt_oss")).model;
  for (const ArchitectureTensor& tensor : architecture_tensors(Architecture::gpt_oss, model)) {
    if (!tensor.name.starts_with("model.layers.1.mlp.experts.gate_up_proj")) continue;
    const int64_t inner = model.moe->intermediate_size;
    for (int64_t expert = 0; expert < model.moe->num_experts; ++expert) {
      const RowRun &gate = tensor.runs.at(static_cast<size_t>(2 * expert)), &up = tensor.runs.at(static_cast<size_t>(2 * expert + 1));
      EXPECT_EQ(gate.file_row, expert * 2 * inner);
      EXPECT_EQ(gate.row, expert * 2 * inner);
      EXPECT_EQ(up.file_row, expert * 2 * inner + 1);
      EXPECT_EQ(up.row, expert * 2 * inner + inner);
      EXPECT_EQ(gate.step * up.step, 4);
    }
  }
}

TEST(HuggingFaceConfig, WindowsAreThoseOfTheArchitecture) {
  const auto sliding = [](json config, const json& change) {
    config.update(change);
    const ModelConfig model = read(config).model;
    std::vector<int64_t> windows;
    for (int64_t i = 0; i < model.num_layers; ++i) windows.push_back(model.window(i));
    const ModelConfig again = read_architecture_config(architecture_config(model, Dtype::f32, {}), "written").model;
    EXPECT_EQ(effective_config(again), effective_config(model));
    return windows;
  };
  const std::vector<int64_t> none = {0, 0, 0}, all = {8, 8, 8};
  const json window = {{"sliding_window", 8}}, used = {{"sliding_window", 8}, {"use_sliding_window", true}, {"max_window_layers", 1}};
  EXPECT_EQ(sliding(config_of("mixtral"), window), all);
  EXPECT_EQ(sliding(config_of("qwen2"), window), none);  // not used
  EXPECT_EQ(sliding(config_of("qwen2"), used), (std::vector<int64_t>{0, 8, 8}));
  EXPECT_EQ(sliding(config_of("qwen3_moe"), used), all);
  const json whole = {{"sliding_window", nullptr}, {"use_sliding_window", true}, {"max_window_layers", 1}};
  for (const char* type : {"qwen2", "qwen3", "qwen3_moe"}) EXPECT_EQ(sliding(config_of(type), whole), none) << type;
  EXPECT_EQ(sliding(config_of("gpt_oss"), window), (std::vector<int64_t>{8, 0, 8}));
  json last = window;
  last["layer_types"] = {"full_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(sliding(config_of("gpt_oss"), last), (std::vector<int64_t>{0, 0, 8}));
  json nowhere = config_of("gpt_oss");
  nowhere.update({{"sliding_window", 8}, {"layer_types", {"full_attention", "full_attention", "full_attention"}}});
  EXPECT_EQ(sliding(nowhere, json::object()), none);
  // Transformers makes the mask of sliding layers, though there are none.
  EXPECT_TRUE(json::parse(architecture_config(read(nowhere).model, Dtype::f32, {}))["sliding_window"].is_number_integer());
}

}  // namespace mantissa::hugging_face_test
