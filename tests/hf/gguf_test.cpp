// A model in GGUF: keys of its architecture, tables of its tokenizer, blocks of MXFP4, and what llama.cpp computes otherwise.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "architecture_configs.h"
#include "hf/gguf_export.h"
#include "hf/gguf_model.h"
#include "models/rope_table.h"
#include "text/bpe_model.h"
#include "text/bpe_trainer.h"

namespace mantissa::gguf_test {

using nlohmann::json;
using test::config_of;
using test::error_of;
using test::read;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

GgufHeader header_of(const GgufKeys& keys) {
  const GgufLayout layout = gguf_layout(keys, {});
  return {layout.front, layout.bytes, "test"};
}

GgufHeader header_of(const std::string& type, const json& change = json::object()) {
  const ArchitectureConfig config = read(config_of(type, change));
  GgufKeys keys;
  add_gguf_model(config.architecture, config.model, keys);
  return header_of(keys);
}

TEST(Gguf, KeysAreThoseThatLlamaCppReads) {
  const GgufHeader llama = header_of("llama", {{"rope_theta", 5e5}});
  EXPECT_EQ(llama.string("general.architecture"), "llama");
  const std::vector<std::pair<const char*, int64_t>> sizes = {
      {"vocab_size", 259},          {"context_length", 64},        {"embedding_length", 96},    {"block_count", 3},
      {"feed_forward_length", 160}, {"rope.dimension_count", 32},  {"attention.head_count", 4}, {"attention.head_count_kv", 2},
      {"attention.key_length", 32}, {"attention.value_length", 32}};
  for (const auto& [key, size] : sizes) EXPECT_EQ(llama.integer(text("llama.", key)), size) << key;
  EXPECT_EQ(llama.number("llama.attention.layer_norm_rms_epsilon"), 1e-5);
  EXPECT_EQ(llama.number("llama.rope.freq_base"), 5e5);
  EXPECT_EQ(llama.find("llama.expert_count"), nullptr);
  const GgufHeader mixtral = header_of("mixtral");
  EXPECT_EQ(mixtral.string("general.architecture"), "llama");
  EXPECT_EQ(mixtral.integer("llama.expert_count"), 6);
  EXPECT_EQ(mixtral.integer("llama.expert_used_count"), 2);
  EXPECT_EQ(mixtral.integer("llama.feed_forward_length"), 160) << "of one expert";
  const GgufHeader qwen = header_of("qwen3_moe", {{"mlp_only_layers", json::array()}});
  EXPECT_EQ(qwen.string("general.architecture"), "qwen3moe");
  EXPECT_EQ(qwen.integer("qwen3moe.expert_feed_forward_length"), 64);
  const GgufHeader oss = header_of("gpt_oss", {{"rope_scaling", {{"rope_type", "default"}}}});
  EXPECT_EQ(oss.integer("gpt-oss.attention.sliding_window"), 4);
  EXPECT_EQ(oss.integer("gpt-oss.expert_feed_forward_length"), 160);
  const GgufHeader gpt2 = header_of("gpt2");
  EXPECT_EQ(gpt2.number("gpt2.attention.layer_norm_epsilon"), 1e-5);
  EXPECT_EQ(gpt2.find("gpt2.rope.freq_base"), nullptr);
}

TEST(Gguf, YarnIsInKeysAndLlama3InATensor) {
  const json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}};
  const GgufHeader plain = header_of("qwen3", {{"rope_scaling", yarn}});
  EXPECT_EQ(plain.string("qwen3.rope.scaling.type"), "yarn");
  EXPECT_EQ(plain.number("qwen3.rope.scaling.factor"), 4.0);
  EXPECT_EQ(plain.integer("qwen3.rope.scaling.original_context_length"), 16);
  EXPECT_EQ(plain.find("qwen3.rope.scaling.attn_factor"), nullptr);
  json louder = yarn;
  louder["attention_factor"] = 2.0;
  EXPECT_NEAR(header_of("qwen3", {{"rope_scaling", louder}}).number("qwen3.rope.scaling.attn_factor").value(),
              2.0 / (0.1 * std::log(4.0) + 1.0), 1e-6);
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 16}};
  const ArchitectureConfig config = read(config_of("llama", {{"rope_scaling", llama3}}));
  const std::vector<float> factors = gguf_rope_factors(config.architecture, config.model);
  ASSERT_EQ(factors.size(), 16U);
  EXPECT_EQ(factors.back(), 8.0F);
  const std::vector<float> plain_frequencies = rope_frequencies(32, 5e5, {}).of_pairs,
                           scaled = rope_frequencies(32, 5e5, config.model.rope_scaling).of_pairs;
  for (size_t i = 0; i < 16; ++i) EXPECT_FLOAT_EQ(plain_frequencies[i] / factors[i], scaled[i]);
  EXPECT_EQ(header_of("llama", {{"rope_scaling", llama3}}).find("llama.rope.scaling.type"), nullptr);
  const ArchitectureConfig qwen = read(config_of("qwen3", {{"rope_scaling", llama3}}));
  EXPECT_THAT(gguf_rope_factors(qwen.architecture, qwen.model), IsEmpty());
}

// Row 2i of a head is row i here, row 2i + 1 is row D / 2 + i.
TEST(Gguf, RowsOfQAndKOfLlamaAreThoseOfNeighborsThatRotate) {
  for (const char* const type : {"llama", "mixtral", "qwen3"}) {
    const ArchitectureConfig config = read(config_of(type));
    for (const ArchitectureTensor& tensor : architecture_tensors(config.architecture, config.model, ExportFormat::gguf)) {
      const bool q = tensor.name.ends_with("attn_q.weight"), k = tensor.name.ends_with("attn_k.weight");
      if (!q && !k) continue;
      std::vector<std::byte> expected;
      for (int64_t row = 0; row < tensor.rows(); ++row) {
        const int64_t in_head = row % 32, turned = row - in_head + in_head % 2 * 16 + in_head / 2;
        expected.push_back(static_cast<std::byte>((k ? 4 * 32 : 0) + (type[0] == 'q' ? row : turned)));
      }
      const auto rows = [](const RowRun& run) {
        std::vector<std::byte> out;
        for (int64_t row = run.row; row < run.row + run.rows; ++row) out.push_back(static_cast<std::byte>(row));
        return out;
      };
      std::vector<std::byte> found;
      for (int64_t first = 0; first < tensor.rows(); first += 24) {
        const std::vector<std::byte> some = file_rows(tensor, first, std::min(tensor.rows(), first + 24), rows);
        found.insert(found.end(), some.begin(), some.end());
      }
      EXPECT_EQ(found, expected) << type << ' ' << tensor.name;
    }
  }
}

TEST(Gguf, ABlockOfMxfp4IsItsScaleAndHalvesSideBySide) {
  std::vector<std::byte> codes, expected = {std::byte{200}};
  for (unsigned pair = 0; pair < 16; ++pair)
    codes.push_back(static_cast<std::byte>((2 * pair % 16) | ((2 * pair + 1) % 16) << 4U));  // element e is e % 16
  codes[15] = std::byte{0x3F};                                                               // elements 30 and 31 are 15 and 3
  for (unsigned j = 0; j < 16; ++j) expected.push_back(static_cast<std::byte>(j | (j == 14 ? 15U : j == 15 ? 3U : j) << 4U));
  EXPECT_EQ(mxfp4_blocks(codes, std::vector{std::byte{200}}), expected);
}

TEST(Gguf, ModelsThatLlamaCppComputesOtherwiseAreToldByOption) {
  const json none = json::object(),
             alternating = json::parse(R"({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
      "tie_word_embeddings": false, "rope_scaling": {"rope_type": "default"}})");
  const auto differences = [&](const std::string& type, const json& change) {
    json config = config_of(type);
    if (type == "qwen3_moe") config["mlp_only_layers"] = json::array();
    if (type == "gpt_oss") config.update(alternating);
    config.update(change);
    const ArchitectureConfig found = read(config);
    return gguf_differences(found.architecture, found.model);
  };
  for (const char* type : test::kArchitectureTypes) EXPECT_THAT(differences(type, none), IsEmpty()) << type;
  const auto yarn = [](const json& more) {
    json scaling = {{"rope_type", "yarn"}, {"factor", 4.0}};
    scaling.update(more);
    return json{{"rope_scaling", scaling}};
  };
  for (const char* type : {"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"})
    EXPECT_THAT(differences(type, yarn({{"beta_fast", 32.0}, {"beta_slow", 1.0}, {"truncate", true}})), IsEmpty()) << type;
  const json llama3 = {{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}, {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0}}}};
  EXPECT_THAT(differences("mixtral", llama3), IsEmpty());
  struct Difference {
    const char* type;
    json change;
    const char* option;
  };
  const std::vector<Difference> all = {
      {"gpt_oss", {{"swiglu_limit", 1.5}}, "model.swiglu_limit: llama.cpp clamps at 7"},
      {"llama", yarn({{"beta_fast", 8.0}}), "model.rope_scaling.beta_fast: "},
      {"qwen3", yarn({{"beta_slow", 0.5}}), "model.rope_scaling.beta_slow: "},
      {"gpt_oss", yarn({{"truncate", false}}), "model.rope_scaling.truncate: "},
      {"qwen2", llama3, "model.rope_scaling.type: "},
      {"qwen3", {{"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 1}}, "model.sliding_window: "},
      {"mixtral", {{"sliding_window", 8}}, "model.sliding_window: "},
      {"gpt_oss", {{"layer_types", {"full_attention", "sliding_attention", "full_attention"}}}, "model.sliding_layers: "},
      {"qwen2", {{"head_dim", 32}}, "model.head_dim: "},
      {"qwen3", {{"attention_bias", true}}, "model.attention_bias: "},
      {"qwen3_moe", {{"attention_bias", true}}, "model.attention_bias: "},
      {"qwen3_moe", {{"norm_topk_prob", false}}, "model.moe.norm_topk_prob: "},
      {"qwen3_moe", {{"mlp_only_layers", {1}}}, "model.moe.dense_layers: "},
      {"gpt2", {{"activation_function", "gelu"}}, "model.activation: "},
      {"gpt_oss", {{"tie_word_embeddings", true}}, "model.tie_word_embeddings: "}};
  for (const auto& [type, change, option] : all) {
    SCOPED_TRACE(text(type, ' ', change.dump()));
    EXPECT_THAT(differences(type, change), ElementsAre(HasSubstr(option)));
  }
}

// Files of a tokenizer that mantissa trains, with 266 tokens and the last four of the model's ids left over.
class GgufTokenizer : public ::testing::Test {
 protected:
  static json trained() {
    BpeTrainer trainer;
    std::string text;
    for (int i = 0; i < 50; ++i) text += "the cat sat on the mat, 123 times. ";
    trainer.add(text, {});
    trainer.end_text({});
    return json::parse(trainer.train(266));
  }
  struct Tables {
    GgufRemarks remarks;
    GgufHeader header;
  };
  static Tables tables(const json& tokenizer, const SpecialTokens& special = {.end = {265}}, std::vector<TokenizerFile> more = {}) {
    ExportFiles files{.files = std::move(more), .special = special};
    if (!tokenizer.is_null()) files.files.push_back({.name = "tokenizer.json", .bytes = tokenizer.dump()});
    GgufKeys keys;
    GgufRemarks remarks = add_gguf_tokenizer(files, 270, keys);
    return {std::move(remarks), header_of(keys)};
  }
};

TEST_F(GgufTokenizer, TablesAreThoseOfTheFile) {
  const json file = trained();
  const auto [remarks, header] = tables(file, {.begin = {}, .end = {265}, .pad = {264}});
  EXPECT_THAT(remarks.differences, IsEmpty());
  EXPECT_THAT(remarks.notes, IsEmpty());
  EXPECT_EQ(header.string("tokenizer.ggml.model"), "gpt2");
  EXPECT_EQ(header.string("tokenizer.ggml.pre"), "llama-bpe");
  const auto tokens = header.strings("tokenizer.ggml.tokens").value();
  ASSERT_EQ(tokens.size(), 270U);
  for (const auto& [token, id] : file["model"]["vocab"].items()) EXPECT_EQ(tokens[id.get<size_t>()], token);
  EXPECT_EQ(tokens[265], "<|endoftext|>");
  EXPECT_EQ(tokens[269], "[PAD269]");
  const auto types = header.integers("tokenizer.ggml.token_type").value();
  EXPECT_EQ(types[264], 1);
  EXPECT_EQ(types[265], 3);
  EXPECT_EQ(types[266], 5);
  const auto merges = header.strings("tokenizer.ggml.merges").value();
  ASSERT_EQ(merges.size(), file["model"]["merges"].size());
  for (size_t i = 0; i < merges.size(); ++i) EXPECT_EQ(merges[i], file["model"]["merges"][i].get<std::string>());
  EXPECT_EQ(header.integer("tokenizer.ggml.eos_token_id"), 265);
  EXPECT_EQ(header.integer("tokenizer.ggml.bos_token_id"), 265);
  EXPECT_EQ(header.integer("tokenizer.ggml.padding_token_id"), 264);
  EXPECT_EQ(header.boolean("tokenizer.ggml.add_bos_token"), false);
  EXPECT_EQ(header.boolean("tokenizer.ggml.add_eos_token"), false);
  EXPECT_EQ(header.find("tokenizer.chat_template"), nullptr);
}

TEST_F(GgufTokenizer, SpecialTokensComeFromTheFilesBeside) {
  json file = trained();
  for (const char* const token : {"<s>", "</s>"})
    file["added_tokens"].push_back({{"id", 265 + file["added_tokens"].size()}, {"content", token}, {"special", token[1] == 's'}});
  file["post_processor"] = json::parse(R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
      {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [266], "tokens": ["<s>"]}}})");
  const auto [remarks, header] = tables(file, {.end = {265}},
                                        {{.name = "generation_config.json", .bytes = R"({"eos_token_id": [267, 265]})"},
                                         {.name = "chat_template.jinja", .bytes = "{{ messages }}"}});
  EXPECT_THAT(remarks.differences, IsEmpty());
  EXPECT_EQ(header.integer("tokenizer.ggml.eos_token_id"), 267);
  EXPECT_EQ(header.integer("tokenizer.ggml.eot_token_id"), 265);
  EXPECT_EQ(header.integer("tokenizer.ggml.bos_token_id"), 266);
  EXPECT_EQ(header.boolean("tokenizer.ggml.add_bos_token"), true);
  EXPECT_EQ(header.string("tokenizer.chat_template"), "{{ messages }}");
  const auto types = header.integers("tokenizer.ggml.token_type").value();
  EXPECT_EQ(types[266], 3);
  EXPECT_EQ(types[267], 4) << "an added token that is not special";
}

TEST_F(GgufTokenizer, TheSplitIsKnownByItsExpression) {
  json file = trained();
  const json byte_level = file["pre_tokenizer"]["pretokenizers"][1];
  const auto pre = [&](const json& pretokenizer) {
    json changed = file;
    changed["pre_tokenizer"] = pretokenizer;
    const Tables found = tables(changed);
    return found.remarks.differences.empty() ? std::string(found.header.string("tokenizer.ggml.pre").value())
                                             : found.remarks.differences[0];
  };
  const auto split = [&](const std::string& expression, const char* behavior = "Isolated", bool invert = false) {
    return json{{"type", "Sequence"},
                {"pretokenizers",
                 {{{"type", "Split"}, {"pattern", {{"Regex", expression}}}, {"behavior", behavior}, {"invert", invert}}, byte_level}}};
  };
  const std::string qwen =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  EXPECT_EQ(pre(split(qwen)), "qwen2");
  EXPECT_EQ(pre(split(qwen, "Removed", true)), "qwen2") << "all is a match";
  EXPECT_THAT(pre(split(qwen, "Removed")), HasSubstr("pre_tokenizer: "));
  EXPECT_THAT(pre(split(qwen + "|x")), HasSubstr("tokenizer.json: pre_tokenizer: "));
  json own = byte_level;
  own["use_regex"] = true;
  EXPECT_EQ(pre(own), "gpt-2");
  EXPECT_EQ(pre({{"type", "Sequence"}, {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", true}}, own}}}), "smollm");
  EXPECT_THAT(pre({{"type", "Sequence"}, {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", false}}, own}}}),
              HasSubstr("pre_tokenizer: "));
  own["add_prefix_space"] = true;
  EXPECT_THAT(pre(own), HasSubstr("pre_tokenizer: "));
  EXPECT_THAT(pre(byte_level), HasSubstr("pre_tokenizer: "));
  const std::string tekken = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
                             R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
                             R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  EXPECT_EQ(pre(split(tekken)), "tekken");
  json close = file;
  close["pre_tokenizer"] = split(tekken);
  EXPECT_THAT(tables(close).remarks.notes, ElementsAre(HasSubstr("other classes of characters")));
}

TEST_F(GgufTokenizer, ATokenizerThatLlamaCppCannotReadIsToldAndLeftOut) {
  const json good = trained();
  const auto expect_left_out = [&](json changed, const char* what) {
    const auto [remarks, header] = tables(changed);
    EXPECT_THAT(remarks.differences, ElementsAre(HasSubstr(what)));
    EXPECT_THAT(remarks.notes, ElementsAre(HasSubstr("the tokenizer is left out of the file")));
    EXPECT_EQ(header.string("tokenizer.ggml.model"), "no_vocab");
    EXPECT_EQ(header.find("tokenizer.ggml.tokens"), nullptr);
  };
  json changed = good;
  changed["model"]["merges"] = json::array();
  expect_left_out(changed, "tokenizer.json: model.merges: is empty");
  changed = good;
  changed["normalizer"] = {{"type", "Lowercase"}};
  expect_left_out(changed, "tokenizer.json: normalizer: ");
  changed = good;
  changed["model"]["type"] = "Unigram";
  expect_left_out(changed, "tokenizer.json: model.type: \"Unigram\"");
  changed = good;
  ASSERT_EQ(changed["model"]["vocab"].erase(letters_of_bytes("\4")), 1U);
  EXPECT_THAT(tables(changed).remarks.differences, IsEmpty()) << "a byte without a token is dropped there as here, as in SmolLM2";
  const GgufRemarks other = tables(nullptr, {}, {{.name = "tokenizer.model", .bytes = "x"}}).remarks;
  EXPECT_THAT(other.differences, ElementsAre(HasSubstr("tokenizer.model: ")));
  EXPECT_THAT(other.notes, ElementsAre(HasSubstr("the tokenizer is left out of the file")));
  const auto [remarks, header] = tables(nullptr);
  EXPECT_THAT(remarks.differences, IsEmpty());
  EXPECT_THAT(remarks.notes, ElementsAre(HasSubstr("the model has none")));
  EXPECT_EQ(header.string("tokenizer.ggml.model"), "no_vocab");
}

TEST_F(GgufTokenizer, WhatLlamaCppTokenizesOtherwiseIsTold) {
  const json good = trained();
  const auto expect_told = [&](const json& changed, const SpecialTokens& special, const char* what) {
    const auto [remarks, header] = tables(changed, special);
    EXPECT_THAT(remarks.differences, ElementsAre(HasSubstr(what)));
    EXPECT_EQ(header.string("tokenizer.ggml.model"), "gpt2");
  };
  const SpecialTokens end = {.end = {265}};
  json changed = good;
  changed["normalizer"] = {{"type", "NFC"}};
  expect_told(changed, end, "tokenizer.json: normalizer: NFC");
  changed = good;
  changed["added_tokens"][0]["lstrip"] = true;
  expect_told(changed, end, "tokenizer.json: added_tokens: \"<|endoftext|>\"");
  expect_told(good, {}, "tokenizer.json: end tokens: none is known");
  expect_told(good, {.end = {1, 2, 3, 4}}, "there are 4, and llama.cpp knows the first three");
  changed = good;
  changed["post_processor"] = {
      {"type", "RobertaProcessing"}, {"sep", {"b", 66}}, {"cls", {"a", 65}}, {"trim_offsets", true}, {"add_prefix_space", false}};
  expect_told(changed, end, "tokenizer.json: post_processor: ");
  // A token that no merges make: llama.cpp takes it whole where the split is llama-bpe.
  changed = good;
  changed["model"]["merges"].erase(changed["model"]["merges"].size() - 1);
  expect_told(changed, end, "tokenizer.json: model.ignore_merges: llama.cpp takes ");
  changed["model"]["ignore_merges"] = true;
  EXPECT_THAT(tables(changed).remarks.differences, IsEmpty());
}

TEST_F(GgufTokenizer, ATokenBeyondTheModelIsRefused) {
  json changed = trained();
  changed["model"]["vocab"]["xx"] = 300;
  const Error error = error_of([&] { tables(changed); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("the token \"xx\" has the id 300, and model.vocab_size is 270"));
}

}  // namespace mantissa::gguf_test
