// GGUF files: models that eval, generate, export and verify take, with the bits of the folder that they were converted from.
#include "exports.h"
#include "gguf_inputs.h"
#include "hf/gguf_reader.h"
#include "mantissa/base/log.h"
#include "process.h"

namespace mantissa::gguf_input_test {

using test::ConvertedFolder;
using test::error_of;
using test::HfFolder;
using test::logits_of;
using test::ProcessResult;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class GgufFiles : public test::ExportTest {
 protected:
  // A folder "NAME" of the architecture, converted into "NAME.gguf" with these types.
  ConvertedFolder converted(const std::string& name, const std::string& type, const ConvertedFolder::TypeOf& types = {},
                            const nlohmann::json& change = {}) const {
    HfFolder(path(name), type, "F32", change);
    ConvertedFolder file(path(name), types);
    file.write(path(name + ".gguf"));
    return file;
  }
  static ConvertedFolder::TypeOf matrices_as(GgmlType type) {
    return [type](const std::string& name, const std::vector<int64_t>& shape) {
      return shape.size() > 1 && name.ends_with(".weight") ? type : GgmlType::f32;
    };
  }
  ProcessResult verified(const std::string& name, const std::string& against = "") const {
    std::vector<std::string> words = {"verify", path(name)};
    if (!against.empty()) words.insert(words.end(), {"--against", path(against)});
    return test::run_mantissa(words, folder_.path());
  }
};

TEST_F(GgufFiles, HaveTheBitsOfTheirFolders) {
  for (const std::string type : test::kArchitectureTypes) {
    SCOPED_TRACE(type);
    converted(type, type);
    const std::string file = type + ".gguf";
    EXPECT_TRUE(logits_of(path(file)) == logits_of(path(type)));
    EXPECT_THAT(forward_differences(config_of_model(path(type)).model, config_of_model(path(file)).model), IsEmpty());
    EXPECT_EQ(difference(file, path(type)), std::nullopt);
    export_to(path(file), type + " of the file");
    export_to(path(type), type + " again");
    EXPECT_TRUE(all_bytes(type + " of the file") == all_bytes(type + " again"));
    EXPECT_EQ(json_in(type + " of the file/config.json"), json_in(type + " again/config.json"));
    export_to(path(file), type + " for mlx", {.format = ExportFormat::mlx, .allow_different = true});
    EXPECT_EQ(difference(type + " for mlx", path(file)), std::nullopt);
  }
}

TEST_F(GgufFiles, OfOtherTypesHaveTheBitsOfTheirValues) {
  for (const auto& [name, type] : std::vector<std::pair<std::string, GgmlType>>{
           {"bf16", GgmlType::bf16}, {"f16", GgmlType::f16}, {"q8_0", GgmlType::q8_0}, {"mxfp4", GgmlType::mxfp4}}) {
    for (const std::string architecture : {"llama", "qwen3_moe", "gpt2", "gpt_oss"}) {
      SCOPED_TRACE(text(name, ' ', architecture));
      const ConvertedFolder file = converted(name + architecture, architecture, matrices_as(type));
      file.write_values(path("values.gguf"));
      EXPECT_EQ(difference(name + architecture + ".gguf", path("values.gguf")), std::nullopt);
      const bool bf16 = type == GgmlType::bf16;  // computed so, though norms, biases and routers are F32
      EXPECT_EQ(HfWeights(path(name + architecture + ".gguf")).config().dtype, bf16 ? Dtype::bf16 : Dtype::f32);
      EXPECT_TRUE(bf16 || logits_of(path(name + architecture + ".gguf")) == logits_of(path("values.gguf")));
    }
  }
}

// Codes stay codes: a packed export has those of the file.
TEST_F(GgufFiles, CodesOfMxfp4ComeBack) {
  converted("codes", "llama", [](const std::string& name, const std::vector<int64_t>& shape) {
    return shape.size() > 1 && name.starts_with("blk.") ? GgmlType::mxfp4 : GgmlType::f32;
  });
  HfWeights weights(path("codes.gguf"));
  EXPECT_EQ(weights.format(), ExportFormat::gguf);
  const std::map<std::string, PackedScheme> packed = weights.packed_modules();
  EXPECT_EQ(packed.at("layers.0.attn.qkv").format, Format::e2m1);
  EXPECT_EQ(packed.at("layers.0.attn.qkv").inputs, Format::none);
  export_to(path("codes.gguf"), "packed", {.weights = ExportWeights::packed});
  EXPECT_EQ(difference("packed", path("codes.gguf")), std::nullopt);
  EXPECT_EQ(verified("packed", "codes.gguf").exit_code, 0);
  EXPECT_EQ(HfFolder(path("packed")).dtype("model.layers.0.mlp.down_proj.weight_packed"), FileDtype::u8);
  converted("experts", "gpt_oss", [](const std::string& name, const std::vector<int64_t>&) {
    return name.ends_with("_exps.weight") ? GgmlType::mxfp4 : GgmlType::f32;
  });
  export_to(path("experts.gguf"), "experts packed", {.weights = ExportWeights::packed});
  EXPECT_EQ(HfFolder(path("experts packed")).dtype("model.layers.0.mlp.experts.gate_up_proj_blocks"), FileDtype::u8);
  EXPECT_EQ(difference("experts packed", path("experts.gguf")), std::nullopt);
}

// Parts of one weight in different types are values, all of them.
TEST_F(GgufFiles, CodesBesideOtherTypesAreValues) {
  const ConvertedFolder file = converted("mixed", "qwen2", [](const std::string& name, const std::vector<int64_t>& shape) {
    return shape.size() > 1 && (name.find("attn_q.") != std::string::npos || name.find("ffn_down") != std::string::npos) ? GgmlType::mxfp4
                                                                                                                         : GgmlType::f32;
  });
  file.write_values(path("values.gguf"));
  EXPECT_TRUE(logits_of(path("mixed.gguf")) == logits_of(path("values.gguf")));
  const std::map<std::string, PackedScheme> packed = HfWeights(path("mixed.gguf")).packed_modules();
  EXPECT_TRUE(packed.contains("layers.0.mlp.down"));
  EXPECT_FALSE(packed.contains("layers.0.attn.qkv"));
}

TEST_F(GgufFiles, TokenizerEndTokensAndTemplateComeAlong) {
  ConvertedFolder file = converted("model", "llama", {}, {{"vocab_size", 264}});
  const test::GgufWords words = test::GgufWords().with("llama-bpe");
  file.keys.insert(file.keys.end(), words.keys.begin(), words.keys.end());
  file.keys.push_back(test::gguf_u32("tokenizer.ggml.eot_token_id", 263));
  file.keys.push_back(test::gguf_text("tokenizer.chat_template", "{{ messages[0]['content'] }}"));
  file.write(path("words.gguf"));
  const LoadedModel loaded = load_model(path("words.gguf"), make_backend("cpu"));
  ASSERT_TRUE(loaded.tokenizer.has_value());
  EXPECT_EQ(loaded.tokenizer->encode_prompt("the", {}).size(), 2U);
  EXPECT_THAT(loaded.end_tokens(), ElementsAre(260, 263));
  EXPECT_TRUE(std::ranges::any_of(loaded.files, [](const TokenizerFile& one) { return one.name == "chat_template.jinja"; }));
  export_to(path("words.gguf"), "out");
  EXPECT_EQ(test::read_file(path("out/chat_template.jinja")), "{{ messages[0]['content'] }}");
  EXPECT_EQ(json_in("out/generation_config.json")["eos_token_id"], nlohmann::json({260, 263}));
  EXPECT_EQ(Tokenizer::from_path(path("out")).encode("the 12"), tokenizer_at(path("words.gguf")).encode("the 12"));
  // One that mantissa does not have is told of, and the model is used without.
  std::erase_if(file.keys, [](const std::string& key) { return key.starts_with(test::gguf_string("tokenizer.ggml.model")); });
  file.keys.push_back(test::gguf_text("tokenizer.ggml.model", "llama"));
  file.write(path("other.gguf"));
  open_log({.console = false, .file = path("log")});
  EXPECT_FALSE(load_model(path("other.gguf"), make_backend("cpu")).tokenizer.has_value());
  close_log();
  EXPECT_THAT(test::read_file(path("log")), HasSubstr("its tokenizer cannot be used: key \"tokenizer.ggml.model\" is \"llama\""));
}

// A file may name the end of a turn alone, and sizes that differ by layer.
TEST_F(GgufFiles, AnEndOfATurnAloneIsAnEndToken) {
  ConvertedFolder file = converted("model", "llama", {}, {{"vocab_size", 264}});
  const test::GgufWords words = test::GgufWords().with("llama-bpe");
  for (const std::string& key : words.keys)
    if (!key.starts_with(test::gguf_string("tokenizer.ggml.eos_token_id"))) file.keys.push_back(key);
  file.keys.push_back(test::gguf_u32("tokenizer.ggml.eot_token_id", 263));
  file.write(path("turn.gguf"));
  EXPECT_THAT(load_model(path("turn.gguf"), make_backend("cpu")).end_tokens(), ElementsAre(263));
}

TEST_F(GgufFiles, AreVerified) {
  const ConvertedFolder file = converted("model", "qwen3", matrices_as(GgmlType::q8_0));
  const ProcessResult good = verified("model.gguf");
  EXPECT_EQ(good.exit_code, 0) << good.errors;
  EXPECT_THAT(good.output, HasSubstr("tensors of its model, all values finite"));
  EXPECT_EQ(verified("model.gguf", "model").exit_code, 1) << "Q8_0 rounds";
  converted("exact", "qwen3");
  EXPECT_THAT(verified("exact.gguf", "exact").output, HasSubstr("0 values differ in"));
  ConvertedFolder bad = file;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  bad.tensors.at("output_norm.weight").bytes.replace(5 * sizeof nan, sizeof nan, test::le(nan));
  bad.write(path("bad.gguf"));
  const ProcessResult damaged = verified("bad.gguf");
  EXPECT_EQ(damaged.exit_code, 4);
  EXPECT_THAT(damaged.errors, HasSubstr("bad.gguf: output_norm.weight[5] is nan"));
  bad = file;
  bad.tensors.at("output_norm.weight").bytes.replace(0, sizeof nan, test::le(std::numeric_limits<float>::infinity()));
  bad.write(path("bad.gguf"));
  EXPECT_THAT(verified("bad.gguf").errors, HasSubstr("output_norm.weight[0] is inf"));
  const std::string bytes = file.bytes();
  test::write_file(path("short.gguf"), bytes.substr(0, bytes.size() - 40));
  EXPECT_THAT(verified("short.gguf").errors, AllOf(HasSubstr("short.gguf: byte "), HasSubstr("beyond the file")));
  EXPECT_EQ(verified("short.gguf").exit_code, 4);
  test::write_file(path("text.gguf"), "not GGUF");
  EXPECT_THAT(verified("text.gguf").errors, HasSubstr("is no GGUF file"));
}

TEST_F(GgufFiles, WhatIsNotTheirModelIsRefused) {
  const ConvertedFolder good = converted("model", "llama");
  const auto refused = [&](const ConvertedFolder& file, ExitCode code) {
    file.write(path("other.gguf"));
    const Error error = error_of([&] { HfWeights weights(path("other.gguf")); });
    EXPECT_EQ(error.code(), code) << error.what();
    return std::string(error.what());
  };
  ConvertedFolder file = good;
  file.tensors.erase("blk.1.ffn_norm.weight");
  EXPECT_THAT(refused(file, ExitCode::data), HasSubstr("lacks tensors of its model:\n  blk.1.ffn_norm.weight"));
  file = good;
  file.tensors["blk.0.ffn_sub_norm.weight"] = file.tensors.at("blk.0.ffn_norm.weight");
  EXPECT_THAT(refused(file, ExitCode::data), HasSubstr("tensors that its model has no place for:\n  blk.0.ffn_sub_norm.weight"));
  file = good;
  file.tensors.at("output_norm.weight") = {.shape = {95}, .bytes = std::string(95 * 4, '\0')};
  EXPECT_THAT(refused(file, ExitCode::data), HasSubstr("output_norm.weight is [95], but its keys make it [96]"));
  file = good;  // the name that scales have here
  file.tensors["blk.0.ffn_up.weight (scales)"] = {.shape = {160, 3}, .bytes = std::string(size_t{160} * 3 * 4, '\0')};
  EXPECT_THAT(refused(file, ExitCode::data), HasSubstr("but the first is F32, which has no scales"));
  file = good;
  file.tensors["rope_freqs.weight"] = {.shape = {(1 << 20) + 1}, .bytes = std::string(((1 << 20) + 1) * 4, '\0')};
  EXPECT_THAT(refused(file, ExitCode::data), HasSubstr("rope_freqs.weight has 1048577 elements, at most 1048576 are accepted"));
  EXPECT_THAT(folder_error("nothing.gguf").what(), HasSubstr("nothing.gguf"));
  // A file that changes while it is read.
  HfWeights weights(path("model.gguf"));
  test::write_file(path("model.gguf"), good.bytes() + " ");
  EXPECT_THAT(error_of([&] { weights.require_unchanged(); }).what(), HasSubstr("was changed or replaced"));
}

TEST_F(GgufFiles, ATiedOutputThatIsThereCountsOnce) {
  ConvertedFolder file = converted("model", "gpt2");
  file.tensors["output.weight"] = file.tensors.at("token_embd.weight");
  file.write(path("twice.gguf"));
  EXPECT_TRUE(HfWeights(path("twice.gguf")).config().model.tie_word_embeddings);
  EXPECT_TRUE(logits_of(path("twice.gguf")) == logits_of(path("model")));
  file.tensors.at("output.weight").bytes[3] = '\x3f';
  file.write(path("own.gguf"));
  EXPECT_FALSE(HfWeights(path("own.gguf")).config().model.tie_word_embeddings);
  ConvertedFolder large = converted("large", "gpt2", {}, {{"vocab_size", 3000}});  // more than is compared at a time
  large.tensors["output.weight"] = large.tensors.at("token_embd.weight");
  large.tensors.at("output.weight").bytes.back() = '\x3f';
  large.write(path("large.gguf"));
  EXPECT_FALSE(HfWeights(path("large.gguf")).config().model.tie_word_embeddings);
}

TEST_F(GgufFiles, AnyBytesOfATensorAreThoseOfAll) {
  for (const GgmlType type : {GgmlType::q8_0, GgmlType::mxfp4}) {
    converted("model", "llama", matrices_as(type));
    GgufModelFiles files(path("model.gguf"));
    for (const SafetensorsEntry& entry : files.entries()) {
      std::vector<std::byte> all(static_cast<size_t>(entry.bytes())), some(std::min<size_t>(all.size() - 11, 300));
      files.read(entry, 0, all);
      files.read(entry, 11, some);
      EXPECT_TRUE(std::ranges::equal(some, std::span(all).subspan(11, some.size()))) << entry.name;
    }
  }
}

TEST_F(GgufFiles, AreInspected) {
  converted("model", "mixtral", matrices_as(GgmlType::q8_0));
  const ProcessResult shown = test::run_mantissa({"inspect", path("model.gguf")}, folder_.path());
  EXPECT_EQ(shown.exit_code, 0) << shown.errors;
  EXPECT_THAT(shown.output, AllOf(HasSubstr("a model in GGUF, version 3"), HasSubstr("architecture  llama"),
                                  HasSubstr("blk.0.ffn_gate_exps.weight"), HasSubstr("Q8_0 [3, 160, 96]")));
  EXPECT_THAT(test::run_mantissa({"inspect", "--diff", path("model.gguf"), path("model")}, folder_.path()).errors,
              HasSubstr("verify --against"));
}

}  // namespace mantissa::gguf_input_test
