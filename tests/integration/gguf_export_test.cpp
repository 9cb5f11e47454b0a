// A model of each architecture as GGUF: the values of a folder for transformers, decoded here by the definition of the format, and files in
// which one thing is wrong, which the comparison tells.
#include "hf/gguf_export.h"

#include "exports.h"
#include "hf/gguf_reader.h"
#include "model_options.h"
#include "process.h"
#include "text/bpe_trainer.h"

namespace mantissa::gguf_export_test {

using test::error_of;
using test::HfFolder;
using test::kEightBits;
using test::kEightBitTable;
using test::kExperts;
using test::kFourBitExperts;
using test::kFourBitTable;
using test::kGpt2;
using test::kGptOss;
using test::Sets;
using test::with;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using std::string_literals::operator""s;

const Sets kLlama = {"model.qk_norm=false", "model.num_attention_heads=2"},
           kQwen2 = {"model.qk_norm=false", "model.attention_bias=qkv", "model.num_attention_heads=2"},
           kMixtral = {"model.qk_norm=false", "model.moe={" + kExperts + "}"}, kQwenExperts = {"model.moe={" + kExperts + "}"};

// The values of a tensor by the definition of its type.
std::vector<float> decoded(GgmlType type, const std::string& bytes) {
  constexpr float kElements[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  std::vector<float> out;
  const auto word = [&](size_t at, size_t width) {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + at, width);
    return bits;
  };
  for (size_t at = 0; type == GgmlType::f32 && at < bytes.size(); at += 4) out.push_back(std::bit_cast<float>(word(at, 4)));
  for (size_t at = 0; type == GgmlType::bf16 && at < bytes.size(); at += 2) out.push_back(std::bit_cast<float>(word(at, 2) << 16U));
  for (size_t at = 0; type == GgmlType::mxfp4 && at < bytes.size(); at += 17) {
    for (size_t element = 0; element < 32; ++element) {
      const uint32_t pair = word(at + 1 + element % 16, 1), code = element < 16 ? pair & 15U : pair >> 4U;
      const float magnitude = std::ldexp(kElements[code & 7U], static_cast<int>(word(at, 1)) - 127);
      out.push_back(code > 7 ? -magnitude : magnitude);
    }
  }
  return out;
}

std::string replaced_in(std::string text, const std::string& part, const std::string& by) {
  const size_t at = text.find(part);
  return at == std::string::npos ? text : text.replace(at, part.size(), by);
}

// The values that a folder for transformers has for a tensor of GGUF, in the order of GGUF.
class FolderValues {
 public:
  FolderValues(const std::string& folder, std::string type, int64_t head) : folder_(folder), type_(std::move(type)), head_(head) {}

  std::vector<float> of(const std::string& gguf) const {
    const bool gpt2 = type_ == "gpt2";
    static const std::map<std::string, std::string> outer = {{"token_embd.weight", "model.embed_tokens.weight"},
                                                             {"output_norm.weight", "model.norm.weight"},
                                                             {"output.weight", "lm_head.weight"}},
                                                    outer_gpt2 = {{"token_embd.weight", "transformer.wte.weight"},
                                                                  {"position_embd.weight", "transformer.wpe.weight"},
                                                                  {"output_norm.weight", "transformer.ln_f.weight"},
                                                                  {"output_norm.bias", "transformer.ln_f.bias"}};
    if (!gguf.starts_with("blk.")) return folder_.values((gpt2 ? outer_gpt2 : outer).at(gguf));
    const std::vector<std::string> parts = split(gguf, '.');  // blk, N, part, weight or bias
    const std::string layer = (gpt2 ? "transformer.h." : "model.layers.") + parts[1] + '.', &part = parts[2], &kind = parts[3];
    if (part.ends_with("_exps")) return experts(layer, part, kind);
    static const std::map<std::string, std::string> names = {{"attn_norm", "input_layernorm"},
                                                             {"attn_q", "self_attn.q_proj"},
                                                             {"attn_k", "self_attn.k_proj"},
                                                             {"attn_v", "self_attn.v_proj"},
                                                             {"attn_output", "self_attn.o_proj"},
                                                             {"attn_q_norm", "self_attn.q_norm"},
                                                             {"attn_k_norm", "self_attn.k_norm"},
                                                             {"ffn_norm", "post_attention_layernorm"},
                                                             {"post_attention_norm", "post_attention_layernorm"},
                                                             {"ffn_gate", "mlp.gate_proj"},
                                                             {"ffn_up", "mlp.up_proj"},
                                                             {"ffn_down", "mlp.down_proj"}},
                                                    names_gpt2 = {{"attn_norm", "ln_1"},          {"attn_qkv", "attn.c_attn"},
                                                                  {"attn_output", "attn.c_proj"}, {"ffn_norm", "ln_2"},
                                                                  {"ffn_up", "mlp.c_fc"},         {"ffn_down", "mlp.c_proj"}};
    if (part == "attn_sinks") return folder_.values(layer + "self_attn.sinks");
    if (part == "ffn_gate_inp") return folder_.values(layer + router() + '.' + kind);
    const std::string name = layer + (gpt2 ? names_gpt2 : names).at(part) + '.' + kind;
    std::vector<float> values = folder_.values(name);
    if (gpt2 && folder_.shape(name).size() == 2) return transposed(values, folder_.shape(name)[0], 1);
    const bool rotates = (type_ == "llama" || type_ == "mixtral") && (part == "attn_q" || part == "attn_k");
    return rotates ? interleaved(values, kind == "bias" ? 1 : folder_.shape(name)[1]) : values;
  }

 private:
  std::string router() const { return type_ == "mixtral" ? "block_sparse_moe.gate" : type_ == "gpt_oss" ? "mlp.router" : "mlp.gate"; }

  // Matrices [rows, columns] become [columns, rows].
  static std::vector<float> transposed(const std::vector<float>& values, int64_t rows, int64_t matrices) {
    const auto each = static_cast<int64_t>(values.size()) / matrices, columns = each / rows;
    std::vector<float> out;
    for (int64_t m = 0; m < matrices; ++m)
      for (int64_t column = 0; column < columns; ++column)
        for (int64_t row = 0; row < rows; ++row) out.push_back(values[static_cast<size_t>(m * each + row * columns + column)]);
    return out;
  }

  std::vector<float> interleaved(const std::vector<float>& values, int64_t columns) const {
    std::vector<float> out;
    for (int64_t row = 0; row < static_cast<int64_t>(values.size()) / columns; ++row) {
      const int64_t in_head = row % head_, from = row - in_head + in_head % 2 * (head_ / 2) + in_head / 2;
      out.insert(out.end(), values.begin() + from * columns, values.begin() + (from + 1) * columns);
    }
    return out;
  }

  std::vector<float> experts(const std::string& layer, const std::string& part, const std::string& kind) const {
    if (type_ == "gpt_oss") {
      const bool down = part == "ffn_down_exps", bias = kind == "bias";
      const std::string name = layer + "mlp.experts." + (down ? "down_proj" : "gate_up_proj") + (bias ? "_bias" : "");
      std::vector<float> all = folder_.values(name);
      const std::vector<int64_t>& shape = folder_.shape(name);
      if (!bias) all = transposed(all, shape[1], shape[0]);
      if (down) return all;
      const int64_t width = bias ? 1 : shape[1];
      std::vector<float> out;  // every other row
      for (int64_t row = part == "ffn_gate_exps" ? 0 : 1; row * width < static_cast<int64_t>(all.size()); row += 2)
        out.insert(out.end(), all.begin() + row * width, all.begin() + (row + 1) * width);
      return out;
    }
    const std::map<std::string, std::string> of_qwen = {{"ffn_gate_exps", "gate_proj"},
                                                        {"ffn_up_exps", "up_proj"},
                                                        {"ffn_down_exps", "down_proj"}},
                                             of_mixtral = {{"ffn_gate_exps", "w1"}, {"ffn_up_exps", "w3"}, {"ffn_down_exps", "w2"}};
    const bool mixtral = type_ == "mixtral";
    std::vector<float> out;
    for (int expert = 0; expert < 3; ++expert) {
      const std::vector<float> one = folder_.values(text(layer, mixtral ? "block_sparse_moe" : "mlp", ".experts.", expert, '.',
                                                         (mixtral ? of_mixtral : of_qwen).at(part), '.', kind));
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  }

  HfFolder folder_;
  std::string type_;
  int64_t head_;
};

class GgufExport : public test::ExportTest {
 protected:
  static constexpr GgufOptions kPacked{.weights = ExportWeights::packed};

  GgufExport() {
    BpeTrainer trainer;
    trainer.add(test::second_order_text(20000), {});
    trainer.end_text({});
    std::filesystem::create_directory(path("words"));
    test::write_file(path("words/tokenizer.json"), trainer.train(272));
  }

  std::string trained_on_words(const std::string& name, const Sets& sets) const {
    return trained(name, with({"data.tokenizer=" + path("words"), "model.tie_word_embeddings=false"}, sets));
  }
  std::string file(const std::string& name) const { return path(name + ".gguf"); }
  ExportedGguf to_gguf(const std::string& from, const std::string& name, const GgufOptions& options = {}) const {
    return export_gguf(from, file(name), options, make_backend("cpu"));
  }
  std::string found_difference(const std::string& name, const std::string& saved) const {
    ExportSource source(saved, make_backend("cpu"));
    GgufFile opened(file(name));
    return gguf_difference(opened, source).value_or("");
  }
  static std::string bytes_of(const GgufFile& opened, const GgufTensor& tensor) {
    std::string out(static_cast<size_t>(tensor.bytes), '\0');
    opened.read(tensor, 0, std::as_writable_bytes(std::span(out)));
    return out;
  }
  // Bits, but for the sign of zeros.
  void expect_values(const std::string& name, const FolderValues& expected) const {
    const GgufFile opened(file(name));
    for (const GgufTensor& tensor : opened.header().tensors()) {
      if (tensor.name == "rope_freqs.weight") continue;
      EXPECT_EQ(decoded(tensor.type, bytes_of(opened, tensor)), expected.of(tensor.name)) << name << ' ' << tensor.name;
    }
  }
  // Writes a file like another with other bytes of one tensor.
  void change(const std::string& name, const std::string& tensor, const std::string& into,
              const std::function<void(std::string&)>& edit) const {
    std::string all = test::read_file(file(name));
    const GgufFile opened(file(name));
    for (const GgufTensor& one : opened.header().tensors()) {
      if (one.name != tensor) continue;
      std::string bytes = bytes_of(opened, one);
      edit(bytes);
      all.replace(static_cast<size_t>(one.begin), bytes.size(), bytes);
    }
    test::write_file(file(into), all);
  }
  void replace(const std::string& name, const std::string& into, const std::string& part, const std::string& by) const {
    ASSERT_EQ(part.size(), by.size());
    const std::string all = test::read_file(file(name));
    ASSERT_NE(all.find(part), std::string::npos) << part;
    test::write_file(file(into), replaced_in(all, part, by));
  }
};

struct Case {
  const char *name, *type;
  Sets sets;
  Sets tensors = {};  // some of the packed file; none: no recipe quantizes
  int64_t decoded = 0;
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class GgufForms : public GgufExport, public ::testing::WithParamInterface<Case> {};

TEST_P(GgufForms, HoldTheValuesOfAFolderForTransformers) {
  const Case& one = GetParam();
  const std::string saved = trained_on_words("run", one.sets);
  export_to(saved, "hf");
  const FolderValues expected(path("hf"), one.type, 32);
  to_gguf(saved, "values");
  EXPECT_EQ(found_difference("values", saved), "");
  expect_values("values", expected);
  EXPECT_EQ(found_difference("values", path("hf")), "") << "of a folder";
  to_gguf(saved, "again");
  EXPECT_TRUE(test::read_file(file("values")) == test::read_file(file("again")));
  EXPECT_THAT(forward_differences(config_of_model(path("hf")).model, config_of_model(file("values")).model), ::testing::IsEmpty());
  EXPECT_TRUE(test::logits_of(file("values")) == test::logits_of(path("hf"))) << "as the file is read back";
  EXPECT_EQ(tokenizer_at(file("values")).encode("The 12 words\n"), Tokenizer::from_path(path("hf")).encode("The 12 words\n"));
  to_gguf(saved, "wide", {.dtype = ExportDtype::fp32});
  const GgufFile wide(file("wide"));
  for (const GgufTensor& tensor : wide.header().tensors()) EXPECT_EQ(tensor.type, GgmlType::f32) << tensor.name;
  expect_values("wide", expected);
  if (one.tensors.empty()) {
    EXPECT_THAT(error_of([&] { to_gguf(saved, "packed", kPacked); }).what(), HasSubstr("nothing to pack"));
    return;
  }
  const ExportedGguf done = to_gguf(saved, "packed", kPacked);
  EXPECT_EQ(done.decoded, one.decoded);
  EXPECT_EQ(verify_gguf(file("packed")), done.tensors);
  EXPECT_EQ(found_difference("packed", saved), "");
  expect_values("packed", expected);
  EXPECT_TRUE(test::logits_of(file("packed")) == test::logits_of(path("hf"))) << "as the packed file is read back";
  const GgufFile packed(file("packed"));
  Sets tensors;
  int64_t codes = 0;
  for (const GgufTensor& tensor : packed.header().tensors()) {
    tensors.push_back(text(tensor.name, ' ', ggml_type_info(tensor.type).name, ' ', shape_text(tensor.shape)));
    codes += tensor.type == GgmlType::mxfp4 ? 1 : 0;
  }
  EXPECT_THAT(tensors, ::testing::IsSupersetOf(one.tensors));
  EXPECT_EQ(done.codes, codes);
  EXPECT_EQ(packed.header().strings("general.tensor_extra.name").value_or(std::vector<std::string_view>()).size(),
            static_cast<size_t>(codes));
  ExportSource source(saved, make_backend("cpu"));
  EXPECT_FALSE(gguf_roundings(packed, source).empty());
}

INSTANTIATE_TEST_SUITE_P(
    , GgufForms,
    ::testing::Values(
        Case{"llama_high", "llama", kLlama},
        Case{"llama",
             "llama",
             with(kLlama, {"precision.recipe=mxfp4_qat", "model.attention_bias=all", "model.mlp_bias=true"}),
             {"blk.0.attn_q.weight MXFP4 [64, 64]", "blk.1.attn_k.bias F32 [32]", "blk.1.ffn_down.weight MXFP4 [64, 96]",
              "output.weight BF16 [272, 64]", "blk.0.attn_norm.weight F32 [64]"}},
        Case{"eight_bits", "llama", with(kLlama, {"precision.recipe=mxfp8_weights"}), {"blk.1.attn_q.weight BF16 [64, 64]"}, 14},
        Case{"mixed",
             "qwen3",
             {"precision.recipe=mxfp8_weights", R"(precision.rules=[{"match": "layers.0.mlp.*", "recipe": "mxfp4_qat"}])"},
             {"blk.0.ffn_up.weight MXFP4 [96, 64]", "blk.1.ffn_up.weight BF16 [96, 64]", "blk.0.attn_q_norm.weight F32 [32]"},
             11},
        Case{"qwen3_tied",
             "qwen3",
             {"precision.recipe=mxfp4_qat_mxfp8_act", "model.tie_word_embeddings=true"},
             {"token_embd.weight BF16 [272, 64]"}},
        Case{"table",
             "qwen3",
             {"precision.recipe=mxfp4_qat", "model.tie_word_embeddings=true",
              R"(precision.rules=[{"match": "embed", "recipe": "mxfp4_qat"}, {"match": "layers.1.mlp.down", "recipe": "high"}])"},
             {"token_embd.weight MXFP4 [272, 64]", "blk.1.ffn_down.weight BF16 [64, 96]"}},
        Case{"table_alone",
             "llama",
             with(kLlama, {kFourBitTable}),
             {"token_embd.weight MXFP4 [272, 64]", "output.weight BF16 [272, 64]", "blk.0.attn_q.weight BF16 [64, 64]"}},
        Case{"table_of_eight_bits",
             "qwen3",
             {kEightBits, kEightBitTable, "model.tie_word_embeddings=true"},
             {"token_embd.weight BF16 [272, 64]"},
             1},
        Case{"qwen2",
             "qwen2",
             with(kQwen2, {"precision.recipe=mxfp4_qat"}),
             {"blk.0.attn_k.bias F32 [32]", "blk.0.attn_v.weight MXFP4 [32, 64]"}},
        Case{"qwen3_moe",
             "qwen3_moe",
             with(kQwenExperts, {"precision.recipe=mxfp4_qat"}),
             {"blk.0.ffn_gate_exps.weight MXFP4 [3, 96, 64]", "blk.1.ffn_down_exps.weight MXFP4 [3, 64, 96]",
              "blk.0.ffn_gate_inp.weight F32 [3, 64]"}},
        Case{"mixtral", "mixtral", with(kMixtral, {"precision.recipe=mxfp4_qat"}), {"blk.1.ffn_up_exps.weight MXFP4 [3, 96, 64]"}},
        Case{"gpt_oss",
             "gpt_oss",
             with(kGptOss, {kFourBitExperts}),
             {"blk.0.ffn_gate_exps.weight MXFP4 [3, 96, 64]", "blk.0.ffn_up_exps.bias F32 [3, 96]", "blk.0.attn_sinks.weight F32 [3]",
              "blk.1.post_attention_norm.weight F32 [64]", "blk.1.ffn_gate_inp.bias F32 [3]", "blk.0.attn_q.weight BF16 [96, 64]"}},
        Case{"gpt2",
             "gpt2",
             with(kGpt2, {"precision.recipe=mxfp4_qat"}),
             {"blk.0.attn_qkv.weight MXFP4 [192, 64]", "position_embd.weight BF16 [16, 64]", "blk.1.ffn_down.weight MXFP4 [64, 256]"}}),
    [](const auto& one) { return std::string(one.param.name); });

// One thing is wrong in each file.
TEST_F(GgufExport, AFileInWhichOneThingIsWrongIsTold) {
  const std::string saved = trained_on_words("run", with(kMixtral, {"precision.recipe=mxfp4_qat"}));
  to_gguf(saved, "good", kPacked);
  const auto expect_told = [&](const std::string& what) {
    EXPECT_THAT(found_difference("bad", saved), HasSubstr(what));
    EXPECT_EQ(error_of([&] { verify_gguf(file("bad")); }).code(), ExitCode::data) << what;
  };
  const std::string q = "blk.0.attn_q.weight", up = "blk.1.ffn_up_exps.weight";
  change("good", q, "bad", [](std::string& bytes) {  // nibbles exchanged
    for (size_t i = 0; i < bytes.size(); ++i)
      if (i % 17 != 0) bytes[i] = static_cast<char>(static_cast<uint8_t>(bytes[i]) << 4U | static_cast<uint8_t>(bytes[i]) >> 4U);
  });
  expect_told("the code of " + q + "[0, ");
  change("good", q, "bad", [](std::string& bytes) {  // rows in the order of transformers
    const size_t row = 34;
    std::string turned;
    for (size_t i = 0; i < bytes.size() / row; ++i) turned += bytes.substr((i - i % 32 + i % 16 * 2 + i % 32 / 16) * row, row);
    bytes = turned;
  });
  expect_told(q + "[");
  change("good", q, "bad", [](std::string& bytes) {  // a scale of its neighbor, the first that has another
    for (size_t i = 0; i + 17 < bytes.size(); i += 17) {
      if (bytes[i] == bytes[i + 17]) continue;
      bytes[i] = bytes[i + 17];
      return;
    }
  });
  expect_told("the scale of the block at " + q + "[");
  change("good", up, "bad", [](std::string& bytes) {  // experts 0 and 1 exchanged
    const size_t each = bytes.size() / 3;
    bytes = bytes.substr(each, each) + bytes.substr(0, each) + bytes.substr(2 * each);
  });
  expect_told(up + "[0, 0, ");
  change("good", "output.weight", "bad", [](std::string& bytes) { bytes[7] = static_cast<char>(bytes[7] ^ 1); });
  expect_told("output.weight[0, 3] is ");
}

// A table of the tokenizer is shifted, a key missing or changed, an input allowed to have 4 bits.
TEST_F(GgufExport, KeysThatAreNotTheModelsAreTold) {
  const std::string saved = trained_on_words("run", with(kLlama, {"precision.recipe=mxfp4_qat"}));
  to_gguf(saved, "good", kPacked);
  const auto expect_told = [&](const std::string& part, const std::string& by, const std::string& what) {
    replace("good", "bad", part, by);
    EXPECT_THAT(found_difference("bad", saved), HasSubstr(what));
    EXPECT_EQ(error_of([&] { verify_gguf(file("bad")); }).code(), ExitCode::data) << what;
  };
  const std::string one = "\1\0\0\0\0\0\0\0"s, b = one + "b" + one + "c", c = one + "c" + one + "b";
  expect_told(b, c, "tokenizer.ggml.tokens [98] is \"c\", not \"b\"");
  expect_told("tokenizer.ggml.pre", "tokenizer.ggml.pro", "lacks the key tokenizer.ggml.pre");
  expect_told("llama.block_count"s + "\4\0\0\0\2"s, "llama.block_count"s + "\4\0\0\0\3"s, "llama.block_count has another value");
  expect_told("general.tensor_extra.prec_a4", "general.tensor_extra.prec_a5",
              "general.tensor_extra.prec_a4 is not false for blk.0.attn_q.weight");
  expect_told("mantissa.version", "llama.xantissax.", "has the key llama.xantissax., which the model does not");
  expect_told("blk.1.attn_norm.weight", "blk.1.attn_nurm.weight", "lacks the tensor blk.1.attn_norm.weight");
  EXPECT_THAT(found_difference("good", trained_on_words("other", with(kLlama, {"precision.recipe=mxfp4_qat", "training.seed=5"}))),
              HasSubstr("token_embd.weight[0, 0] is "));
}

TEST_F(GgufExport, WhatLlamaCppComputesOtherwiseIsRefusedUnlessItIsAllowed) {
  const std::string saved = trained_on_words("windows", {"model.sliding_window=8"});
  const Error error = error_of([&] { to_gguf(saved, "windows"); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("model.sliding_window: llama.cpp has no windows"), HasSubstr("--allow-different")));
  EXPECT_FALSE(std::filesystem::exists(file("windows")));
  to_gguf(saved, "windows", {.allow_different = true});
  EXPECT_EQ(found_difference("windows", saved), "");
  EXPECT_THAT(GgufFile(file("windows")).header().strings("mantissa.differences").value(),
              ::testing::ElementsAre(HasSubstr("model.sliding_window: ")));
  EXPECT_THAT(error_of([&] { to_gguf(saved, "windows", {.allow_different = true}); }).what(),
              HasSubstr("windows.gguf: exists already; give another name"));
  const std::string letters = trained("letters", {});
  EXPECT_THAT(error_of([&] { to_gguf(letters, "letters"); }).what(), HasSubstr("tokenizer.json: model.merges: is empty"));
  to_gguf(letters, "letters", {.allow_different = true});
  EXPECT_EQ(GgufFile(file("letters")).header().string("tokenizer.ggml.model"), "no_vocab");
  const auto last_lines = [&](const std::string& from, const std::string& name) {
    return test::run_mantissa({"export", from, "--output", file(name), "--format", "gguf", "--allow-different"}, folder_.path()).output;
  };
  const std::string left_out =
      ": holds no tokenizer: llama-server and llama-cli cannot serve the file, only programs that call libllama with token ids\n";
  EXPECT_THAT(last_lines(letters, "again"), HasSubstr(file("again") + left_out));
  EXPECT_THAT(last_lines(saved, "words"), AllOf(HasSubstr("read back and equal"), Not(HasSubstr("holds no tokenizer"))));
}

TEST_F(GgufExport, RotationsOfLlama3AreATensorAndOfYarnKeys) {
  const std::string llama3 = trained_on_words(
      "llama3", with(kLlama, {R"(model.rope_scaling={"type": "llama3", "factor": 8, "original_max_position_embeddings": 8})"}));
  to_gguf(llama3, "llama3");
  const GgufFile scaled(file("llama3"));
  const GgufTensor& factors = scaled.header().tensors().back();
  EXPECT_EQ(factors.name, "rope_freqs.weight");
  EXPECT_EQ(decoded(factors.type, bytes_of(scaled, factors)).back(), 8.0F);
  change("llama3", factors.name, "bad", [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); });
  EXPECT_THAT(found_difference("bad", llama3), HasSubstr("rope_freqs.weight is not the model's"));
  const std::string yarn = trained_on_words(
      "yarn", with(kLlama, {R"(model.rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 8})"}));
  to_gguf(yarn, "yarn");
  EXPECT_EQ(GgufFile(file("yarn")).header().string("llama.rope.scaling.type"), "yarn");
  EXPECT_THAT(found_difference("yarn", llama3), HasSubstr("rope.scaling"));
  for (const std::string& name : {"llama3"s, "yarn"s}) {
    export_to(path(name + ".gguf"), name + " again");
    export_to(name == "yarn" ? yarn : llama3, name + " hf");
    EXPECT_EQ(json_in(name + " again/config.json")["rope_scaling"], json_in(name + " hf/config.json")["rope_scaling"]);
  }
}

TEST_F(GgufExport, LlamaCppMayRoundInputsToFourBitsWhereTrainingDid) {
  const std::string saved = trained_on_words("narrow", with(kLlama, {"precision.recipe=mxfp4_qat_mxfp4_act"})),
                    other = trained_on_words("wide", with(kLlama, {"precision.recipe=mxfp4_qat"}));
  to_gguf(saved, "narrow", kPacked);
  const GgufFile packed(file("narrow"));
  EXPECT_FALSE(packed.header().strings("general.tensor_extra.name"));
  EXPECT_EQ(found_difference("narrow", saved), "");
  ExportSource as_trained(saved, make_backend("cpu")), in_high(other, make_backend("cpu"));
  const char* const by_rule = "to 4 bits on GPUs of the generation Blackwell, as forward here does, but by a scale rule of its own";
  EXPECT_THAT(gguf_roundings(packed, as_trained), ::testing::Contains(HasSubstr(by_rule)));
  EXPECT_THAT(gguf_roundings(packed, in_high), ::testing::Not(::testing::Contains(HasSubstr(by_rule))));
}

TEST_F(GgufExport, RowsThatEndWithinABlockAreValuesOrRefused) {
  const std::string saved = trained_on_words("odd", with(kLlama, {"precision.recipe=mxfp4_qat", "model.intermediate_size=100"}));
  to_gguf(saved, "values");
  EXPECT_EQ(found_difference("values", saved), "");
  EXPECT_THAT(
      error_of([&] { to_gguf(saved, "packed", kPacked); }).what(),
      HasSubstr("layers.0.mlp.down (recipe mxfp4_qat, e2m1 1x32 flashinfer): its rows of 100 elements end within a block of 32, and "
                "MXFP4 of GGUF has whole blocks only: take dequantized weights, or leave it in high precision by a rule"));
}

// ggml wants F32 there, also of a folder that has them in BF16.
TEST_F(GgufExport, RoutersAreF32WhateverTypeTheyHad) {
  const HfFolder folder(path("model"), "mixtral", "BF16");
  ASSERT_EQ(folder.dtype("model.layers.0.block_sparse_moe.gate.weight"), FileDtype::bf16);
  to_gguf(path("model"), "model", {.allow_different = true});  // there is no tokenizer
  std::map<std::string, GgmlType> types;
  const GgufFile written(file("model"));
  for (const GgufTensor& tensor : written.header().tensors()) types.emplace(tensor.name, tensor.type);
  EXPECT_EQ(types.at("blk.0.ffn_gate_inp.weight"), GgmlType::f32);
  EXPECT_EQ(types.at("blk.0.attn_q.weight"), GgmlType::bf16);
}

// A model that llama.cpp computes otherwise comes back as it was trained where the file tells it, and is refused where it cannot.
TEST_F(GgufExport, DifferencesAreReadBackOrRefused) {
  const auto truncate = [&](const std::string& name, bool whole) {
    const std::string scaling =
        text(R"(model.rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "truncate": )",
             whole ? "true" : "false", '}');
    to_gguf(trained_on_words(name, with(kGptOss, {scaling})), name, {.allow_different = !whole});
    return config_of_model(file(name)).model.rope_scaling.value().truncate;
  };
  EXPECT_EQ(truncate("whole", true), true);
  EXPECT_EQ(truncate("parts", false), false);
  to_gguf(trained_on_words("windows", {"model.sliding_window=8"}), "windows", {.allow_different = true});
  const Error error = error_of([&] { config_of_model(file("windows")); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("--allow-different"), HasSubstr("model.sliding_window")));
}

// The commands, and the exit codes of a file that is right, of another model, and damaged.
TEST_F(GgufExport, VerifyTellsAFileOfAnotherModelFromADamagedOne) {
  const std::string saved = trained_on_words("run", with(kLlama, {"precision.recipe=mxfp4_qat"})),
                    other = trained_on_words("other", with(kLlama, {"precision.recipe=mxfp4_qat", "training.seed=5"}));
  const auto run = [&](std::vector<std::string> words) { return test::run_mantissa(words, folder_.path()); };
  const test::ProcessResult exported = run({"export", saved, "--output", file("good"), "--format", "gguf", "--weights", "packed"});
  EXPECT_EQ(exported.exit_code, 0) << exported.errors;
  EXPECT_THAT(exported.output,
              AllOf(HasSubstr("good.gguf: llama of step 1, 21 tensors, "), HasSubstr("good.gguf: llama.cpp rounds inputs of 14 MXFP4")));
  const test::ProcessResult right = run({"verify", file("good"), "--against", saved});
  EXPECT_EQ(right.exit_code, 0) << right.errors;
  EXPECT_THAT(right.output, AllOf(HasSubstr("0 values differ in 21 tensors"),
                                  HasSubstr("codes and scales of 14 tensors are those of forward, bit for bit"),
                                  HasSubstr("llama.cpp rounds inputs of 14 MXFP4 tensors to Q8_0")));
  EXPECT_EQ(run({"verify", file("good"), "--against", other}).exit_code, 1);
  EXPECT_EQ(run({"verify", file("good")}).exit_code, 0);
  change("good", "output.weight", "bad", [](std::string& bytes) { bytes[7] = static_cast<char>(bytes[7] ^ 1); });
  EXPECT_EQ(run({"verify", file("bad"), "--against", saved}).exit_code, 4);
  EXPECT_EQ(run({"verify", file("bad")}).exit_code, 4);
  // Without its hashes a file is still an export, whose keys count.
  replace("good", "unhashed", "mantissa.xxh64", "mantissa.xxh65");
  EXPECT_EQ(run({"verify", file("unhashed")}).exit_code, 2);
  EXPECT_EQ(run({"verify", file("unhashed"), "--against", saved}).exit_code, 0);
  replace("unhashed", "four", "general.tensor_extra.prec_a4", "general.tensor_extra.prec_a5");
  EXPECT_THAT(run({"verify", file("four"), "--against", saved}).output, HasSubstr("prec_a"));
  // For a file of another program, what llama.cpp rounds is told as well.
  replace("four", "other", "mantissa.version", "mantissa.vorsion");
  const test::ProcessResult other_program = run({"verify", file("other"), "--against", saved});
  EXPECT_EQ(other_program.exit_code, 0) << other_program.output << other_program.errors;
  EXPECT_THAT(other_program.output, HasSubstr("llama.cpp rounds inputs of 14 MXFP4 tensors to 4 bits on GPUs"));
  EXPECT_THAT(run({"export", saved, "--output", file("folder")}).errors, HasSubstr("add --format gguf"));
  EXPECT_FALSE(std::filesystem::exists(file("folder")));
  const test::ProcessResult eight = run({"export", trained_on_words("eight", with(kLlama, {"precision.recipe=mxfp8_weights"})), "--output",
                                         file("eight"), "--format", "gguf", "--weights", "packed"});
  EXPECT_THAT(
      eight.output,
      HasSubstr("14 tensors of codes that are not MXFP4, the only packed type that is written, hold the values that they decode to"));
  to_gguf(trained_on_words("inputs", with(kLlama, {"precision.recipe=mxfp8"})), "inputs", kPacked);
  EXPECT_THAT(run({"verify", file("inputs"), "--against", path("runs/inputs")}).output,
              HasSubstr("llama.cpp does not quantize inputs of 14 tensors; forward here does"));
}

// Every verification tells the differences that --allow-different let through, and a tokenizer that was left out is one that counts.
TEST_F(GgufExport, VerifyRepeatsWhatWasAllowed) {
  const auto run = [&](std::vector<std::string> words) { return test::run_mantissa(words, folder_.path()); };
  const std::string windows = trained_on_words("windows", {"model.sliding_window=8"}), letters = trained("letters", {});
  const std::string told =
      "windows.gguf: llama.cpp computes it otherwise than forward, or cannot load it: model.sliding_window: llama.cpp has";
  to_gguf(windows, "windows", {.allow_different = true});
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, {"--against", windows}}) {
    std::vector<std::string> words = {"verify", file("windows")};
    words.insert(words.end(), more.begin(), more.end());
    const test::ProcessResult result = run(words);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    EXPECT_THAT(result.output, HasSubstr(told));
  }
  to_gguf(letters, "letters", {.allow_different = true});
  const test::ProcessResult against = run({"verify", file("letters"), "--against", letters});
  EXPECT_EQ(against.exit_code, 1) << against.errors;
  EXPECT_THAT(against.output,
              AllOf(HasSubstr("0 values differ"), HasSubstr("letters.gguf: lacks the tokenizer of the model: llama-server")));
  EXPECT_EQ(run({"verify", file("letters")}).exit_code, 0);
  // A model that never had one lacks none.
  const HfFolder folder(path("model"), "llama", "BF16");
  std::filesystem::remove(path("model/tokenizer.json"));
  to_gguf(path("model"), "model");
  EXPECT_EQ(run({"verify", file("model"), "--against", path("model")}).exit_code, 0);
}

// Its norms are F32, also where training computed them in bf16.
TEST_F(GgufExport, ComesBackForMlxAsItWasTrained) {
  const std::string saved = trained_on_words("run", with(kLlama, {"precision.recipe=mxfp4_qat"}));
  const ExportOptions packed{.format = ExportFormat::mlx, .weights = ExportWeights::packed};
  to_gguf(saved, "run", kPacked);
  export_to(saved, "mlx", packed);
  export_to(file("run"), "again", packed);
  EXPECT_TRUE(all_bytes("mlx") == all_bytes("again"));
}

}  // namespace mantissa::gguf_export_test
