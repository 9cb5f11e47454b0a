// Keys of config.json: the model that a file means, which is written as a file that means the same; and refusals, by the key's name.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "architecture_configs.h"
#include "checkpoint/saved_model.h"

namespace mantissa::architecture_keys_test {

using nlohmann::json;
using test::config_of;
using test::error_of;
using test::kArchitectureTypes;
using test::read;
using test::Refusal;
using ::testing::HasSubstr;

// Section "model" of a file as it is read, with the values that options leave to others, the window of each layer and the type of the
// weights.
json model_of(const ArchitectureConfig& config) {
  ModelConfig given = config.model;
  given.rope_scaling = with_derived(given).rope_scaling;
  json model = json::parse(effective_config(given));
  model.update({{"num_key_value_heads", config.model.kv_heads()}, {"head_dim", config.model.head_size()}, {"windows", json::array()}});
  for (int64_t layer = 0; layer < config.model.num_layers; ++layer) model["windows"].push_back(config.model.window(layer));
  model["dtype"] = config.dtype == Dtype::bf16 ? "bf16" : "fp32";
  return model;
}

void expect_members(const json& found, const json& expected) {
  for (const auto& [key, value] : expected.items()) {
    if (value.is_object() && found.at(key).is_object())
      expect_members(found.at(key), value);
    else
      EXPECT_EQ(found.at(key), value) << key;
  }
}

struct Meaning {
  const char* type;
  std::string change;
  const char* model;
};
// Expects this model from the file, and from the one that is written of it.
void expect_meaning(const json& config, const char* model) {
  SCOPED_TRACE(config.dump());
  const ArchitectureConfig first = read(config);
  expect_members(model_of(first), json::parse(model));
  const std::string written = architecture_config(first.model, first.dtype, {.begin = {1}, .end = {2, 3}, .pad = {7}}, "",
                                                  read_router_loss_keys(config.dump(), "config.json"));
  EXPECT_EQ(model_of(read_architecture_config(written, "written")), model_of(first)) << written;
  const SpecialTokens tokens = read_special_tokens(written, "written");
  EXPECT_EQ(json({tokens.begin, tokens.end, tokens.pad}), json::parse("[[1], [2, 3], [7]]"));
}

// Defaults of the configuration classes of transformers 4.57 and 5.23 where the file is silent.
TEST(ArchitectureKeys, AbsentKeysAreThoseOfTheClass) {
  const std::vector<std::pair<const char*, const char*>> classes = {
      {"llama", R"({"num_key_value_heads": 32, "head_dim": 64, "max_position_embeddings": 2048, "norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling": null, "attention_bias": "none", "mlp_bias": false, "tie_word_embeddings": false})"},
      {"qwen2", R"({"num_key_value_heads": 32, "head_dim": 64, "max_position_embeddings": 32768, "norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling": null, "attention_bias": "qkv", "mlp_bias": false, "tie_word_embeddings": false})"},
      {"qwen3", R"({"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling": null, "attention_bias": "none", "mlp_bias": false, "tie_word_embeddings": false})"},
      {"qwen3_moe", R"({"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 32768, "norm_eps": 1e-6, "rope_theta": 1e4,
        "rope_scaling": null, "attention_bias": "none", "tie_word_embeddings": false,
        "moe": {"num_experts": 128, "num_experts_per_tok": 8, "intermediate_size": 768, "norm_topk_prob": false, "dense_layers": []}})"},
      {"mixtral", R"({"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "norm_eps": 1e-5, "rope_theta": 1e6,
        "rope_scaling": null, "attention_bias": "none", "tie_word_embeddings": false,
        "moe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 160}})"},
      {"gpt_oss", R"({"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "norm_eps": 1e-5, "rope_theta": 150000,
        "rope_scaling": {"type": "yarn", "factor": 32, "original_max_position_embeddings": 4096, "truncate": false},
        "attention_bias": "all", "tie_word_embeddings": false,
        "moe": {"num_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 160}})"},
      {"gpt2", R"({"max_position_embeddings": 1024, "norm_eps": 1e-5, "activation": "gelu_tanh", "intermediate_size": 8192,
        "tie_word_embeddings": true})"}};
  for (const auto& [type, model] : classes) {
    json config = json::parse(type == std::string("gpt2") ? R"({"n_embd": 2048, "n_layer": 3, "n_head": 32})"
                                                          : R"({"hidden_size": 2048, "intermediate_size": 160, "num_hidden_layers": 3,
                                                                "num_attention_heads": 32})");
    config.update({{"model_type", type}, {"vocab_size", 259}});
    expect_meaning(config, model);
    EXPECT_FALSE(read(config).says_dtype);
    EXPECT_EQ(read(config).dtype, Dtype::f32);
  }
}

TEST(ArchitectureKeys, AFileAndWhatIsWrittenOfItMeanOneModel) {
  std::vector<Meaning> meanings = {
      // null stands for None in a class, which does not always mean what a missing key means.
      {"llama", R"({"num_key_value_heads": null, "head_dim": null})", R"({"num_key_value_heads": 4, "head_dim": 24})"},
      {"qwen2", R"({"num_key_value_heads": null})", R"({"num_key_value_heads": 4})"},
      {"qwen3", R"({"num_key_value_heads": null})", R"({"num_key_value_heads": 4})"},
      {"mixtral", R"({"num_key_value_heads": null, "head_dim": null})", R"({"num_key_value_heads": 4, "head_dim": 24})"},
      {"gpt_oss", R"({"num_key_value_heads": null, "head_dim": null})", R"({"num_key_value_heads": 4, "head_dim": 24})"},
      {"llama", R"({"rope_theta": null})", R"({"rope_theta": 1e4})"},
      {"mixtral", R"({"rope_theta": null})", R"({"rope_theta": 1e6})"},
      {"gpt_oss", R"({"rope_theta": null})", R"({"rope_theta": 150000})"},
      {"llama", R"({"mystery": null})", R"({"activation": "swiglu", "qk_norm": false})"},
      // Unusual values.
      {"qwen2", R"({"head_dim": 32})", R"({"head_dim": 32})"},
      {"qwen3", R"({"head_dim": 24, "attention_bias": true})", R"({"head_dim": 24, "attention_bias": "all"})"},
      {"llama", R"({"mlp_bias": true})", R"({"mlp_bias": true})"},
      {"gpt2", "{}", R"({"intermediate_size": 384, "tie_word_embeddings": true, "norm": "layer", "position": "learned"})"},
      {"gpt2", R"({"n_inner": 100, "activation_function": "gelu"})", R"({"intermediate_size": 100, "activation": "gelu_erf"})"},
      {"gpt2", R"({"activation_function": "gelu_pytorch_tanh"})", R"({"activation": "gelu_tanh"})"},
      {"gpt2", R"({"activation_function": "gelu_new"})", R"({"activation": "gelu_tanh"})"},
      {"llama", R"({"dtype": "float32"})", R"({"dtype": "fp32"})"},  // the newer name comes first
      {"llama", R"({"torch_dtype": "float32", "dtype": "bfloat16"})", R"({"dtype": "bf16"})"},
      {"llama", R"({"torch_dtype": "float32"})", R"({"dtype": "fp32"})"},
      {"llama", R"({"torch_dtype": "absent", "dtype": "float16"})", R"({"dtype": "fp32"})"},
      // Experts.
      {"qwen3_moe", "{}", R"({"qk_norm": true, "moe": {"dense_layers": [1], "intermediate_size": 64, "norm_topk_prob": true}})"},
      {"qwen3_moe", R"({"norm_topk_prob": "absent"})", R"({"moe": {"norm_topk_prob": false}})"},
      {"qwen3_moe", R"({"decoder_sparse_step": 2, "mlp_only_layers": []})", R"({"moe": {"dense_layers": [0, 2]}})"},
      {"qwen3_moe", R"({"decoder_sparse_step": 2})", R"({"moe": null})"},
      {"qwen3_moe", R"({"mlp_only_layers": [0, 1, 2], "num_experts_per_tok": 0})", R"({"moe": null})"}};
  for (const char* type : {"qwen3_moe", "mixtral", "gpt_oss"})
    meanings.push_back({type, R"({"router_aux_loss_coef": 0.25})", R"({"moe": {"aux_loss_coef": 0}})"});
  for (const Meaning& meaning : meanings) expect_meaning(config_of(meaning.type, json::parse(meaning.change)), meaning.model);
}

// The loss in transformers is coefficient * E * sum over experts of f P over all layers at once, f being counts / tokens, which sum to K;
// here it is coefficient * E / K * sum of f P in each layer. With the loads of each layer alike both are the same at coefficient * K /
// layers.
TEST(ArchitectureKeys, TheLossOfRoutersIsTakenWhereTheFileAsksForItAndMeansWhatItMeansThere) {
  const auto keys = [](const char* type, const char* change) { return read(config_of(type, json::parse(change))); };
  struct Case {
    const char *type, *change;
    double coefficient;
    std::string said;
  };
  const std::string none =
                        "is not taken, because output_router_logits is not true and transformers adds no loss then: "
                        "model.moe.aux_loss_coef is 0 unless --set gives it",
                    two = " in each layer: transformers sums over 2 experts of a token and takes ";
  for (const auto& [type, change, coefficient, said] : std::vector<Case>{
           {"gpt_oss", R"({"router_aux_loss_coef": 0.9, "output_router_logits": false})", 0.0, "router_aux_loss_coef = 0.9 " + none},
           {"mixtral", R"({"router_aux_loss_coef": 0.02, "output_router_logits": null})", 0.0, "router_aux_loss_coef = 0.02 " + none},
           {"qwen3_moe", R"({"router_aux_loss_coef": 0, "output_router_logits": false})", 0.0, ""},
           {"mixtral", R"({"router_aux_loss_coef": "absent", "output_router_logits": false})", 0.0, ""},
           {"mixtral", R"({"router_aux_loss_coef": 0.0123456789, "output_router_logits": true})", 0.0123456789 * 2 / 3,
            text("router_aux_loss_coef = 0.0123456789 is model.moe.aux_loss_coef ", 0.0123456789 * 2 / 3, two, "3 layers at once")},
           {"mixtral", R"({"router_aux_loss_coef": 0.75, "output_router_logits": true})", 0.5,
            "router_aux_loss_coef = 0.75 is model.moe.aux_loss_coef 0.5" + two + "3 layers at once"},
           {"qwen3_moe",
            R"({"router_aux_loss_coef": 0.25, "output_router_logits": true, "num_experts_per_tok": 3, "mlp_only_layers": [1]})", 0.375,
            "router_aux_loss_coef = 0.25 is model.moe.aux_loss_coef 0.375 in each layer: transformers sums over 3 experts of a token and "
            "takes 2 layers at once"},
           {"gpt_oss", R"({"output_router_logits": true})", 0.001 * 2 / 3,
            "router_aux_loss_coef is model.moe.aux_loss_coef 0.000666667" + two + "3 layers at once"}}) {
    SCOPED_TRACE(change);
    const ArchitectureConfig config = keys(type, change);
    EXPECT_EQ(config.model.moe->aux_loss_coef, coefficient);
    EXPECT_EQ(joined(config.training_keys), said);
    expect_meaning(config_of(type, json::parse(change)), "{}");
  }
  const auto written = [&](double used, const RouterLossKeys& from) {
    ModelConfig model = keys("mixtral", "{}").model;
    model.moe->aux_loss_coef = used;
    const json config = json::parse(architecture_config(model, Dtype::bf16, {}, "", from));
    return json({config["router_aux_loss_coef"], config["output_router_logits"]});
  };
  EXPECT_EQ(written(0.0, {.asked = false, .coefficient = 0.9}), json({0.9, false})) << "what training did not use stays";
  EXPECT_EQ(written(0.5, {.asked = false, .coefficient = 0.9}), json({0.75, false}));
  EXPECT_EQ(written(0.5, {.asked = true, .coefficient = 0.75}), json({0.75, true}));
  EXPECT_EQ(written(0.0, {.asked = true, .coefficient = 0.75}), json({0.0, true})) << "a run without the loss";
  EXPECT_EQ(written(0.002, {}), json({0.003, false})) << "as short as it was given";
  for (const char* const asks : {"true", "false", "null"})
    EXPECT_EQ(read_router_loss_keys("{\"output_router_logits\": " + std::string(asks) + "}", "config.json").asked,
              std::string(asks) == "true")
        << asks;
  for (const char* wrong : {R"({"output_router_logits": 1})", R"({"router_aux_loss_coef": "x"})"})
    EXPECT_EQ(error_of([&] { keys("mixtral", wrong); }).code(), ExitCode::data) << wrong;
}

TEST(ArchitectureKeys, DropoutThatTrainingHereDoesNotHaveIsTold) {
  const auto said = [](const char* type, const char* change) { return joined(read(config_of(type, json::parse(change))).training_keys); };
  EXPECT_EQ(said("gpt2", R"({"attn_pdrop": 0.1, "embd_pdrop": 0.2, "resid_pdrop": 0.0})"),
            "attn_pdrop = 0.1 is not applied: training here drops nothing, embd_pdrop = 0.2 is not applied: training here drops nothing");
  for (const char* type : {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"}) {
    EXPECT_EQ(said(type, R"({"attention_dropout": 0.5})"), "attention_dropout = 0.5 is not applied: training here drops nothing") << type;
    EXPECT_EQ(said(type, R"({"attention_dropout": 0.0})"), "") << type;
  }
}

TEST(ArchitectureKeys, KeysOfTrainingAreKnownInEveryFile) {
  const json neutral = {{"pretraining_tp", 1}, {"router_jitter_noise", 0.0}, {"attention_dropout", 0.0},
                        {"attn_pdrop", 0.0},   {"embd_pdrop", 0.0},          {"resid_pdrop", 0.0}},
             others = {{"pretraining_tp", 2}, {"router_jitter_noise", 0.1}};
  for (const char* type : {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "gpt2"}) {
    EXPECT_EQ(joined(read(config_of(type, neutral)).training_keys), "") << type;
    for (const auto& [key, value] : others.items()) {
      const json change = {{key, value}};
      const Error error = error_of([&] { read(config_of(type, change)); });
      EXPECT_EQ(error.code(), ExitCode::usage) << type;
      EXPECT_THAT(error.what(), HasSubstr(change.begin().key() + " = " + change.begin()->dump() + ": mantissa computes only ")) << type;
    }
    EXPECT_EQ(joined(read(config_of(type, {{"resid_pdrop", 0.5}})).training_keys),
              "resid_pdrop = 0.5 is not applied: training here drops nothing")
        << type;
  }
}

TEST(ArchitectureKeys, RotaryPositionsOfBothVersionsOfTransformersMeanOneModel) {
  const std::string llama3 = R"("rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0)",
                    yarn = R"("rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32)";
  std::vector<Meaning> meanings = {
      // Rotary positions: transformers 4 writes rope_theta and rope_scaling, 5 writes rope_parameters.
      {"llama", R"({"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 12345}})",
       R"({"rope_theta": 12345, "rope_scaling": null})"},
      {"llama", R"({"rope_parameters": {"rope_theta": 5e5}})", R"({"rope_theta": 5e5, "rope_scaling": null})"},
      {"llama", R"({"partial_rotary_factor": 1, "rope_scaling": {"rope_type": "default", "partial_rotary_factor": 1.0}})",
       R"({"rope_scaling": null})"},
      {"llama", R"({"rope_scaling": {)" + llama3 + R"(, "original_max_position_embeddings": 8}})",
       R"({"rope_scaling": {"type": "llama3", "factor": 4, "low_freq_factor": 1.5, "original_max_position_embeddings": 8}})"},
      {"llama", R"({"rope_scaling": {)" + llama3 + "}}", R"({"rope_scaling": {"original_max_position_embeddings": 64}})"},
      {"qwen3", R"({"rope_theta": "absent", "rope_parameters": {"rope_type": "yarn", "rope_theta": 777, "beta_fast": 16, "truncate": false,
                    "attention_factor": 1.25, "original_max_position_embeddings": 16, "factor": null}})",
       R"({"rope_theta": 777, "rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1.25, "beta_fast": 16}})"},
      {"gpt_oss", R"({"rope_scaling": {"rope_type": "default"}})", R"({"rope_scaling": null})"}};
  const char* const scaled =
      R"({"rope_theta": 777, "rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": 32}})";
  for (const char* type : {"llama", "gpt_oss"}) {
    const std::string four = R"("rope_theta": 777, "rope_scaling": {)" + yarn + "}",
                      five = R"("rope_parameters": {"rope_theta": 777, )" + yarn + "}";
    meanings.push_back({type, "{" + four + "}", scaled});
    meanings.push_back({type, R"({"rope_theta": "absent", )" + five + "}", scaled});
    meanings.push_back({type, "{" + four + ", " + five + "}", scaled});
  }
  for (const Meaning& meaning : meanings) expect_meaning(config_of(meaning.type, json::parse(meaning.change)), meaning.model);
}

TEST(ArchitectureKeys, WindowsAreThoseOfTheLayers) {
  std::vector<Meaning> meanings = {
      // Windows by layer.
      {"mixtral", R"({"sliding_window": 8})", R"({"windows": [8, 8, 8]})"},
      {"mixtral", R"({"layer_types": ["full_attention", "full_attention", "full_attention"]})", R"({"windows": [0, 0, 0]})"},
      {"qwen2", R"({"sliding_window": 8})", R"({"windows": [0, 0, 0]})"},  // not used
      {"qwen2", R"({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1})", R"({"windows": [0, 8, 8]})"},
      {"qwen3_moe", R"({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1})", R"({"windows": [8, 8, 8]})"},
      {"qwen3", R"({"use_sliding_window": true, "max_window_layers": 0})", R"({"sliding_window": 4096})"},
      {"gpt_oss", R"({"sliding_window": 8})", R"({"windows": [8, 0, 8]})"},
      {"gpt_oss", R"({"sliding_window": 8, "layer_types": ["full_attention", "full_attention", "sliding_attention"]})",
       R"({"windows": [0, 0, 8]})"},
      {"gpt_oss", R"({"sliding_window": 8, "layer_types": ["full_attention", "full_attention", "full_attention"]})",
       R"({"windows": [0, 0, 0]})"}};
  for (const char* type : {"qwen2", "qwen3", "qwen3_moe"})
    meanings.push_back(
        {type, R"({"sliding_window": null, "use_sliding_window": true, "max_window_layers": 0})", R"({"windows": [0, 0, 0]})"});
  for (const Meaning& meaning : meanings) expect_meaning(config_of(meaning.type, json::parse(meaning.change)), meaning.model);
}

TEST(ArchitectureKeys, EveryKeyThatChangesTheModelIsReadOrRefused) {
  for (const char* type : kArchitectureTypes) {
    const json original = config_of(type), before = model_of(read(original));
    EXPECT_STREQ(architecture_name(read(original).architecture), type);
    for (const auto& [key, value] : original.items()) {
      if (value.is_number_integer()) {
        EXPECT_NE(model_of(read(config_of(type, {{key, value.get<int64_t>() * 2}}))), before) << key;
      }
    }
    const Error error = error_of([&] { read(config_of(type, {{"mystery", 1}, {"clip_qkv", 1}})); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    EXPECT_THAT(error.what(), HasSubstr("config.json: keys that mantissa does not know, and that may change what the model computes:\n  "
                                        "clip_qkv = 1\n  mystery = 1\nremove them if they change nothing"));
  }
}

// Other readers, older ones among them, look at these keys, and need them in this order.
TEST(ArchitectureKeys, WhatIsWrittenIsReadByOthers) {
  const auto written = [](const char* type, const char* change) {
    return architecture_config(read(config_of(type, json::parse(change))).model, Dtype::bf16, {});
  };
  const std::string windows = written("qwen3", R"({"use_sliding_window": true, "sliding_window": 8, "max_window_layers": 1})");
  EXPECT_EQ(json::parse(windows)["max_window_layers"], 0);
  const std::string full = written("gpt_oss", R"({"layer_types": ["full_attention", "full_attention", "full_attention"]})");
  EXPECT_TRUE(json::parse(full)["sliding_window"].is_number_integer()) << "transformers makes the mask of sliding layers all the same";
  EXPECT_EQ(json::parse(written("gpt2", R"({"activation_function": "gelu"})"))["activation_function"], "gelu");
  const std::string scaled = written("gpt_oss", "{}");
  size_t at = scaled.find("\"rope_scaling\"");
  for (const char* const key : {"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}) {
    const size_t next = scaled.find(text('"', key, "\":"), at);
    ASSERT_NE(next, std::string::npos) << key << " in " << scaled.substr(at);
    at = next;
  }
  const json plain = json::parse(written("gpt_oss", R"({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})"))["rope_scaling"];
  EXPECT_EQ(plain.value("beta_fast", 0.0), 32.0) << "vLLM's class of gpt-oss takes it for granted";
  EXPECT_EQ(plain.value("beta_slow", 0.0), 1.0);
}

// DeepSeek-V4 has the key beside quantization_config.
TEST(ArchitectureKeys, ExpertDtypeIsAPartOfWhatSaysHowWeightsArePacked) {
  const json fp8 = {{"quant_method", "fp8"}};
  const ArchitectureConfig found = read(config_of("qwen3_moe", {{"expert_dtype", "fp4"}, {"quantization_config", fp8}}));
  EXPECT_EQ(json::parse(found.quantization), json({{"quant_method", "fp8"}, {"expert_dtype", "fp4"}}));
  const json written = json::parse(architecture_config(found.model, Dtype::bf16, {}, found.quantization));
  EXPECT_EQ(written["expert_dtype"], "fp4");
  EXPECT_EQ(written["quantization_config"], fp8);
}

TEST(ArchitectureKeys, SpecialTokensAreIds) {
  for (const char* ids : {R"("x")", R"([1, "x"])", "1.5", "[[1]]", "{}", "18446744073709551615", "[1, 18446744073709551615]"}) {
    const Error error = error_of([&] { read_special_tokens(text(R"({"eos_token_id": )", ids, "}"), "a/config.json"); });
    EXPECT_EQ(error.code(), ExitCode::data) << ids;
    EXPECT_THAT(error.what(), ::testing::StartsWith("a/config.json: eos_token_id")) << ids;
  }
}

TEST(ArchitectureKeys, WhatIsNoConfigIsDamage) {
  for (const char* text : {"[]", "\"text\"", "5", "", "{", "{\"model_type\":\"llama\",\"model_type\":\"llama\"}", "{\"a\":NaN}", "\xff"})
    EXPECT_EQ(error_of([&] { read_architecture_config(text, "config.json"); }).code(), ExitCode::data) << text;
}

}  // namespace mantissa::architecture_keys_test
