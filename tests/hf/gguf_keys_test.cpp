// The keys of GGUF files as the files of the folder from which such files are made.
#include <gmock/gmock.h>

#include <numbers>

#include "data/tokenizer.h"
#include "gguf_inputs.h"
#include "hf/gguf_reader.h"
#include "json/json_fields.h"
#include "text/bpe_model.h"

namespace mantissa::test::gguf_keys_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class GgufKeys : public ::testing::Test {
 protected:
  // A folder of the architecture, converted.
  ConvertedFolder converted(const std::string& type, const nlohmann::json& change = {}) const {
    HfFolder(folder_ / type, type, "F32", change);
    return ConvertedFolder(folder_ / type);
  }
  static GgufHeader header_of(const ConvertedFolder& file) {
    const std::string bytes = file.bytes();
    return {bytes, std::ssize(bytes), "FILE"};
  }
  static ModelConfig model_of(const ConvertedFolder& file, const GgufTensorFacts& facts) {
    return read_architecture_config(gguf_config(header_of(file), facts), "config.json").model;
  }
  ModelConfig model_of_folder(const std::string& type) const {
    return read_architecture_config(read_file(folder_ / (type + "/config.json")), "config.json").model;
  }
  static void expect_refused(ConvertedFolder file, const std::vector<std::string>& keys, const std::string& what,
                             ExitCode code = ExitCode::usage, const GgufTensorFacts& facts = {}) {
    file.keys.insert(file.keys.end(), keys.begin(), keys.end());
    const Error error = error_of([&] { gguf_config(header_of(file), facts); });
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(error.what(), AllOf(::testing::StartsWith("FILE: "), HasSubstr(what)));
  }
  static ConvertedFolder without(ConvertedFolder file, const std::string& key) {
    std::erase_if(file.keys, [&](const std::string& one) { return one.starts_with(gguf_string(key)); });
    return file;
  }

  TemporaryFolder folder_;
};

TEST_F(GgufKeys, AreTheModelOfTheFolder) {
  for (const std::string type : kArchitectureTypes) {
    const ConvertedFolder file = converted(type);
    const bool tied = !file.tensors.contains("output.weight");
    ModelConfig expected = model_of_folder(type);
    if (type != "gpt2") expected.head_dim = expected.head_size();  // which a key says
    EXPECT_EQ(json_text(model_of(file, {.tied = tied})), json_text(expected)) << type;
  }
  const nlohmann::json biases = {{"attention_bias", true}, {"mlp_bias", true}};
  const ConvertedFolder llama = converted("llama", biases);
  EXPECT_EQ(json_text(model_of(llama, {})), json_text(model_of_folder("llama")));
}

TEST_F(GgufKeys, WhatMantissaDoesNotComputeIsRefusedByItsKey) {
  const ConvertedFolder llama = converted("llama"), qwen = converted("qwen3_moe"), gpt2 = converted("gpt2"), oss = converted("gpt_oss");
  expect_refused(without(llama, "general.architecture"), {}, "has no key \"general.architecture\"", ExitCode::data);
  expect_refused(without(llama, "general.architecture"), {gguf_text("general.architecture", "mamba")},
                 "is \"mamba\"; mantissa knows llama, qwen2, qwen3, qwen3moe, gpt-oss, gpt2");
  for (const char* const key : {"block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
                                "attention.layer_norm_rms_epsilon"})
    expect_refused(without(llama, "llama." + std::string(key)), {}, "has no key \"llama." + std::string(key) + "\"", ExitCode::data);
  expect_refused(without(gpt2, "gpt2.attention.layer_norm_epsilon"), {}, "has no key", ExitCode::data);
  expect_refused(without(oss, "gpt-oss.attention.sliding_window"), {}, "has no key", ExitCode::data);
  expect_refused(without(llama, "llama.block_count"), {gguf_text("llama.block_count", "2")}, "must be an integer, got string",
                 ExitCode::data);
  expect_refused(llama, {gguf_u32("llama.new_thing", 1)},
                 "keys that mantissa does not know, and that may change what the model computes:\n  llama.new_thing");
  expect_refused(llama, {gguf_f32("llama.rope.scaling.factor", 4)}, "key \"llama.rope.scaling.factor\": is 4: a linear scaling");
  expect_refused(llama, {gguf_text("llama.rope.scaling.type", "longrope")}, "is \"longrope\"; mantissa knows none, yarn");
  expect_refused(llama, {gguf_u32("llama.attention.sliding_window", 8)}, "mantissa reads windows of gpt-oss only");
  expect_refused(llama, {gguf_bool("llama.attention.causal", false)}, "is false: mantissa reads models that see what is before");
  expect_refused(without(llama, "llama.rope.dimension_count"), {gguf_u32("llama.rope.dimension_count", 8)}, "rotates all channels");
  expect_refused(without(llama, "llama.attention.value_length"), {gguf_u32("llama.attention.value_length", 8)}, "have one size");
  expect_refused(qwen, {gguf_u32("qwen3moe.expert_gating_func", 2)}, "routers with a softmax");
  expect_refused(qwen, {gguf_bool("qwen3moe.expert_weights_norm", false)}, "weights of experts are normalized");
  expect_refused(gpt2, {gguf_u32("gpt2.attention.key_length", 5)}, "heads of GPT-2 divide its channels");
  expect_refused(gpt2, {gguf_u32("gpt2.expert_count", 2)}, "mantissa knows no gpt2 with experts");
  expect_refused(oss, {gguf_f32("gpt-oss.rope.scaling.yarn_ext_factor", 0.5F)}, "mantissa has yarn as its paper defines it");
  ConvertedFolder file = llama;
  file.tensors.erase("token_embd.weight");
  expect_refused(file, {}, "has no matrix token_embd.weight", ExitCode::data);
}

TEST_F(GgufKeys, NeutralKeysChangeNothing) {
  ConvertedFolder file = converted("llama");
  const std::string plain = gguf_config(header_of(file), {});
  for (const std::string& key :
       {gguf_text("general.name", "x"), gguf_bool("llama.attention.causal", true), gguf_text("llama.rope.scaling.type", "none"),
        gguf_f32("llama.rope.scaling.factor", 1), gguf_u32("llama.expert_count", 0), gguf_u32("llama.attention.sliding_window", 64),
        gguf_u32("tokenizer.ggml.token_type_count", 1)})
    file.keys.push_back(key);
  EXPECT_EQ(gguf_config(header_of(file), {}), plain);
  ConvertedFolder gpt2 = converted("gpt2");
  const std::string without_heads = gguf_config(header_of(gpt2), {});
  const auto head = static_cast<uint32_t>(model_of_folder("gpt2").head_size());
  for (const char* key : {"gpt2.attention.key_length", "gpt2.attention.value_length"}) gpt2.keys.push_back(gguf_u32(key, head));
  EXPECT_EQ(gguf_config(header_of(gpt2), {}), without_heads) << "as exports have them";
}

TEST_F(GgufKeys, KeysThatAreMissingHaveTheDefaultsOfLlamaCpp) {
  ConvertedFolder file = converted("llama", {{"rope_theta", 5e5}});
  for (const char* key : {"llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length",
                          "llama.rope.dimension_count", "llama.rope.freq_base"})
    file = without(file, key);
  const ModelConfig model = model_of(file, {});
  EXPECT_EQ(model.kv_heads(), model.num_attention_heads);
  EXPECT_EQ(model.head_size(), model.hidden_size / model.num_attention_heads);
  EXPECT_EQ(model.rope_theta, 1e4);
}

TEST_F(GgufKeys, YarnIsThatOfItsKeys) {
  ConvertedFolder file = converted("llama");
  for (const std::string& key : {gguf_text("llama.rope.scaling.type", "yarn"), gguf_f32("llama.rope.scaling.factor", 4),
                                 gguf_u32("llama.rope.scaling.original_context_length", 16),
                                 gguf_f32("llama.rope.scaling.yarn_beta_fast", 24), gguf_f32("llama.rope.scaling.yarn_attn_factor", 0.5F)})
    file.keys.push_back(key);
  const RopeScalingConfig yarn = model_of(file, {}).rope_scaling.value();
  EXPECT_EQ(yarn.type, RopeScaling::yarn);
  EXPECT_EQ(yarn.factor, 4.0);
  EXPECT_EQ(yarn.original_max_position_embeddings, 16);
  EXPECT_EQ(yarn.beta_fast, 24.0);
  EXPECT_EQ(yarn.beta_slow, std::nullopt);
  EXPECT_NEAR(yarn.attention_factor.value(), 0.5 * (1 + 0.1 * std::log(4.0)), 1e-7);
  EXPECT_EQ(model_of(converted("gpt_oss"), {}).rope_scaling->truncate, false) << "as the class of gpt-oss has it";
  ConvertedFolder usual = without(file, "llama.rope.scaling.yarn_attn_factor");
  usual.keys.push_back(gguf_f32("llama.rope.scaling.yarn_attn_factor", -1));
  EXPECT_EQ(model_of(usual, {}).rope_scaling->attention_factor, std::nullopt);
  file.keys.push_back(gguf_f32("llama.rope.scaling.attn_factor", 3e38F));
  EXPECT_NO_THROW(gguf_config(header_of(file), {}));
  expect_refused(without(file, "llama.rope.scaling.yarn_attn_factor"), {gguf_f32("llama.rope.scaling.yarn_attn_factor", 3e38F)},
                 "key \"llama.rope.scaling.attn_factor\": is with that of yarn inf");
}

// The tensor has what wavelengths are divided by; the numbers that make it are found again, or others that make the same.
TEST_F(GgufKeys, FactorsOfLlama3AreItsScaling) {
  const ConvertedFolder file = converted("llama");
  const ModelConfig plain = model_of_folder("llama");
  const auto factors = [&](double factor, double original, double low, double high) {
    std::vector<float> out;
    const int64_t half = plain.head_size() / 2;
    for (int64_t i = 0; i < half; ++i) {
      const float frequency = 1.0F / std::pow(static_cast<float>(plain.rope_theta), static_cast<float>(i) / static_cast<float>(half));
      const double wavelength = 2 * std::numbers::pi / static_cast<double>(frequency);
      const double smooth = std::clamp((original / wavelength - low) / (high - low), 0.0, 1.0);
      out.push_back(static_cast<float>(1.0 / ((1.0 - smooth) / factor + smooth)));
    }
    return out;
  };
  const auto scaling = [&](const std::vector<float>& of) { return model_of(file, {.rope_factors = of}).rope_scaling; };
  const RopeScalingConfig found = scaling(factors(8, 8192, 1, 4)).value();
  EXPECT_EQ(found.type, RopeScaling::llama3);
  EXPECT_EQ(found.factor, 8.0);
  EXPECT_EQ(found.original_max_position_embeddings, 8192);
  EXPECT_EQ(found.low_freq_factor, 1.0);
  EXPECT_EQ(found.high_freq_factor, 4.0);
  const RopeScalingConfig solved = scaling(factors(16, 3000, 1, 50)).value();
  EXPECT_EQ(solved.original_max_position_embeddings, 3000);
  EXPECT_NEAR(solved.high_freq_factor.value(), 50.0, 0.01);
  EXPECT_EQ(scaling(std::vector<float>(static_cast<size_t>(plain.head_size() / 2), 1.0F)), std::nullopt);
  const RopeScalingConfig one_between = scaling(factors(8, 8, 1, 4)).value();  // its length is no key
  EXPECT_EQ(one_between.original_max_position_embeddings, 8);
  EXPECT_EQ(one_between.high_freq_factor, 4.0);
  std::vector<float> almost_none(static_cast<size_t>(plain.head_size() / 2), 1.0F);
  almost_none.back() = 1.0005F;
  ConvertedFolder endless = file;
  endless.keys.push_back(gguf_f32("llama.rope.scaling.original_context_length", 1e30F));
  EXPECT_EQ(model_of(endless, {.rope_factors = almost_none}).rope_scaling->original_max_position_embeddings, 8192);
  std::vector<float> other = factors(8, 8192, 1, 4);
  other.back() = 3;
  expect_refused(file, {}, "rope_freqs.weight is not the scaling of Llama 3", ExitCode::usage, {.rope_factors = other});
  other.pop_back();
  expect_refused(file, {}, "rope_freqs.weight has", ExitCode::data, {.rope_factors = other});
}

// Where no factor is between 1 and the largest, nothing but a key tells the length.
TEST_F(GgufKeys, FactorsOfLlama3HaveTheLengthOfItsKey) {
  constexpr double kBase = 1e12;
  ConvertedFolder file = converted("llama", {{"rope_theta", kBase}});
  const int64_t half = model_of_folder("llama").head_size() / 2;
  const auto wavelength = [&](int i) { return 2 * std::numbers::pi * std::pow(kBase, i / static_cast<double>(half)); };
  std::vector<float> factors(static_cast<size_t>(half), 8.0F);
  std::fill_n(factors.begin(), 3, 1.0F);
  const auto length = static_cast<uint32_t>(std::sqrt(4 * wavelength(2) * wavelength(3)));
  expect_refused(file, {}, "rope_freqs.weight is not the scaling of Llama 3", ExitCode::usage, {.rope_factors = factors});
  file.keys.push_back(gguf_u32("llama.rope.scaling.original_context_length", length));
  EXPECT_EQ(model_of(file, {.rope_factors = factors}).rope_scaling->original_max_position_embeddings, length);
}

using Words = GgufWords;

Tokenizer tokenizer_of(const Words& words, const std::vector<std::string>& more = {}) {
  const auto files = gguf_tokenizer(words.header(more));
  return Tokenizer::bpe({.tokenizer = files.at("tokenizer.json"), .config = files.at("tokenizer_config.json")}, "FILE");
}

TEST(GgufTokenizers, EncodeAsTheTokenizersOfTheirFolders) {
  const Words words;
  const auto ids = [&](const char* pre, const char* of) { return tokenizer_of(words.with(pre)).encode(of); };
  for (const std::string& pre : gguf_pretokenizers()) {
    SCOPED_TRACE(pre);
    EXPECT_THAT(ids(pre.c_str(), "the the<|end|><tool>"), ElementsAre(Words::kThe, Words::kSpaceThe, Words::kEnd, Words::kTool));
    const Tokenizer tokenizer = tokenizer_of(words.with(pre));
    EXPECT_EQ(tokenizer.decode(tokenizer.encode("the 12\n\xc3\xa9 <tool>")), "the 12\n\xc3\xa9 <tool>");
    EXPECT_EQ(tokenizer.size(), 264);
    EXPECT_EQ(tokenizer.end_token(), Words::kEnd);
    EXPECT_EQ(tokenizer.id_of("[PAD]"), std::nullopt) << "unused";
  }
  for (const char* pre : {"gpt-2", "llama-bpe", "gpt-4o"}) EXPECT_THAT(ids(pre, "12"), ElementsAre(Words::kTwelve)) << pre;
  for (const char* pre : {"smollm", "qwen2", "tekken"}) EXPECT_THAT(ids(pre, "12"), ElementsAre('1', '2')) << pre;
  Words unmerged = words;
  unmerged.merges.pop_back();
  EXPECT_THAT(tokenizer_of(unmerged.with("llama-bpe")).encode("x the"), ElementsAre('x', Words::kSpaceThe)) << "a token as it is";
  EXPECT_THAT(tokenizer_of(unmerged.with("gpt-2")).encode("x the"), ElementsAre('x', ' ', Words::kThe));
  EXPECT_EQ(ids("qwen2", "e\xcc\x81"), ids("qwen2", "\xc3\xa9")) << "normalized";
  EXPECT_NE(ids("gpt-2", "e\xcc\x81"), ids("gpt-2", "\xc3\xa9"));
  const std::string own = gguf_text("mantissa.version", "1"),
                    noted = gguf_texts("mantissa.differences", {"tokenizer.json: normalizer: NFC: llama.cpp normalizes nothing"});
  const auto normalizes = [](const Tokenizer& one) { return one.encode("e\xcc\x81") == one.encode("\xc3\xa9"); };
  EXPECT_FALSE(normalizes(tokenizer_of(words.with("qwen2"), {own}))) << "an export notes it";
  EXPECT_TRUE(normalizes(tokenizer_of(words.with("qwen2"), {own, noted})));
  EXPECT_TRUE(normalizes(tokenizer_of(words.with("gpt-2"), {own, noted})));
}

TEST(GgufTokenizers, PutTheTokensAroundATextThatTheirKeysSay) {
  const Words words;
  const auto before = [](const Tokenizer& tokenizer) {
    return std::vector(tokenizer.before_text().begin(), tokenizer.before_text().end());
  };
  EXPECT_THAT(before(tokenizer_of(words.with("llama-bpe"))), ElementsAre(Words::kTurn));
  EXPECT_THAT(before(tokenizer_of(words.with("qwen2"))), IsEmpty());
  EXPECT_THAT(before(tokenizer_of(words.with("llama-bpe"), {gguf_bool("tokenizer.ggml.add_bos_token", false)})), IsEmpty());
  const Tokenizer both =
      tokenizer_of(words.with("qwen2"), {gguf_bool("tokenizer.ggml.add_bos_token", true), gguf_bool("tokenizer.ggml.add_eos_token", true)});
  EXPECT_THAT(before(both), ElementsAre(Words::kTurn));
  EXPECT_THAT(std::vector(both.after_text().begin(), both.after_text().end()), ElementsAre(Words::kEnd));
  EXPECT_THAT(gguf_end_tokens(words.with("qwen2").header()), ElementsAre(Words::kEnd));
  EXPECT_THAT(gguf_end_tokens(words.with("qwen2").header({gguf_u32("tokenizer.ggml.eot_token_id", Words::kTurn)})),
              ElementsAre(Words::kEnd, Words::kTurn));
  EXPECT_THAT(gguf_end_tokens(words.with("qwen2").header({gguf_u32("tokenizer.ggml.eot_token_id", Words::kEnd)})),
              ElementsAre(Words::kEnd));
}

TEST(GgufTokenizers, OthersAreRefusedByTheirKey) {
  const auto refused = [](const GgufHeader& header, ExitCode code) {
    const Error error = error_of([&] { gguf_tokenizer(header); });
    EXPECT_EQ(error.code(), code) << error.what();
    return std::string(error.what());
  };
  const Words words;
  EXPECT_THAT(refused(words.with("default", "llama").header(), ExitCode::usage),
              HasSubstr("key \"tokenizer.ggml.model\" is \"llama\"; mantissa reads \"gpt2\""));
  EXPECT_THAT(refused(GgufWords().header(), ExitCode::usage), HasSubstr("key \"tokenizer.ggml.model\" is missing"));
  EXPECT_THAT(refused(words.with("default").header(), ExitCode::usage), HasSubstr("is \"default\"; mantissa knows gpt-2, smollm, qwen2"));
  Words other = words.with("qwen2");
  other.keys.erase(other.keys.begin() + 1);
  EXPECT_THAT(refused(other.header(), ExitCode::usage), HasSubstr("tokenizer.ggml.pre\" is missing"));
  other = words.with("qwen2");
  other.keys.erase(other.keys.begin() + 4);
  EXPECT_THAT(refused(other.header(), ExitCode::data), HasSubstr("has no key \"tokenizer.ggml.merges\""));
  other = words;
  other.types.pop_back();
  EXPECT_THAT(refused(other.with("qwen2").header(), ExitCode::data), HasSubstr("has 263 entries, but there are 264 tokens"));
  other = words;
  other.tokens.back() = "<|end|>";
  EXPECT_THAT(refused(other.with("qwen2").header(), ExitCode::data), HasSubstr("\"<|end|>\" is there twice"));
  EXPECT_THAT(refused(words.with("qwen2").header({gguf_u32("tokenizer.ggml.padding_token_id", 264)}), ExitCode::data),
              HasSubstr("key \"tokenizer.ggml.padding_token_id\": is 264, but there are 264 tokens"));
}

TEST_F(GgufKeys, OneOfSeveralFilesIsNoModel) {
  const ConvertedFolder good = converted("qwen3");
  const auto refused = [&](const std::string& key) {
    ConvertedFolder file = good;
    file.keys.push_back(key);
    file.write(folder_ / "part.gguf");
    const Error error = error_of([&] { GgufModelFiles model(folder_ / "part.gguf"); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(refused(gguf_key("split.count", GgufType::u16, le(uint16_t{3}))),
              HasSubstr("is one of 3 files of a model; llama-gguf-split --merge"));
  EXPECT_THAT(refused(gguf_text("general.type", "adapter")), HasSubstr("key \"general.type\": is \"adapter\""));
}

}  // namespace mantissa::test::gguf_keys_test
