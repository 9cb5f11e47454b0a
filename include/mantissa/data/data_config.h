// Section "data" of a config says what to read. Paths are absolute after load_run_config() and may be globs.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/data/chat_template.h"
#include "mantissa/json/config.h"

namespace mantissa {

enum class DataFormat { automatic, text, jsonl, megatron, nanogpt, llmc, llmq };
constexpr bool is_text(DataFormat format) { return format == DataFormat::text || format == DataFormat::jsonl; }  // others hold ids
enum class TokenDtype { u16, u32 };
enum class TokenizerKind { byte, character, bpe };

constexpr auto choices(DataFormat) {
  return std::array{Choice{"auto", DataFormat::automatic},    Choice{"text", DataFormat::text},       Choice{"jsonl", DataFormat::jsonl},
                    Choice{"megatron", DataFormat::megatron}, Choice{"nanogpt", DataFormat::nanogpt}, Choice{"llmc", DataFormat::llmc},
                    Choice{"llmq", DataFormat::llmq}};
}
constexpr auto choices(TokenDtype) { return std::array{Choice{"u16", TokenDtype::u16}, Choice{"u32", TokenDtype::u32}}; }
constexpr auto choices(TokenizerKind) {
  return std::array{Choice{"byte", TokenizerKind::byte}, Choice{"char", TokenizerKind::character}, Choice{"bpe", TokenizerKind::bpe}};
}

struct WeightedPath {
  std::string path;
  double weight = 1.0;

  void fields(auto& v) {
    v("path", path, "file, glob, or prefix of a Megatron .bin/.idx pair", limits::input_path);
    v("weight", weight, "share of the samples, relative to the other entries", limits::positive);
  }
};

struct DataConfig {
  std::optional<std::string> path;
  double valid_fraction = 0.1;
  std::vector<WeightedPath> train;
  std::vector<WeightedPath> valid;
  DataFormat format = DataFormat::automatic;
  TokenDtype dtype = TokenDtype::u16;
  std::optional<std::string> tokenizer;
  std::optional<ChatTemplate> chat_template = {};
  std::optional<std::string> chat_date = {};
  bool append_eod = false;
  std::optional<int64_t> eod_id;
  bool mask_eod_loss = false;
  std::optional<bool> reset_position_ids = {};
  std::optional<bool> document_mask = {};

  bool resets_positions() const { return reset_position_ids.value_or(false); }
  bool masks_documents() const { return document_mask.value_or(false); }

  bool has_validation() const { return path ? valid_fraction > 0.0 : !valid.empty(); }
  bool uses_bytes() const { return tokenizer == choice_name(TokenizerKind::byte); }
  bool uses_characters() const { return tokenizer == choice_name(TokenizerKind::character); }

  void validate(ConfigReport& report) const;

  void fields(auto& v) {
    v("path", path, "short form for one file or glob: its tail is the validation part; excludes train and valid", limits::input_path);
    v("valid_fraction", valid_fraction, "with path: the last part of the tokens, kept for validation", limits::fraction);
    v("train", train, "training sets, mixed by weight");
    v("valid", valid, "validation sets, reported one by one and averaged by tokens");
    v("format", format,
      "auto recognizes a file by magic number, sibling .idx, extension and content; text that looks like JSON is not read as plain text");
    v("dtype", dtype, "width of the ids of a raw nanoGPT file");
    v("tokenizer", tokenizer,
      "for text, JSONL and samples: byte (256 ids), char (the characters of the data), or the path of a tokenizer.json, of a folder that "
      "has one, or of a run; null: the tokenizer of the model that the run starts from or resumes, else none, for token files only");
    v("chat_template", chat_template,
      "renders JSONL with messages as text, as the models of that name do: chatml, qwen2.5, qwen3, llama3, harmony; null: no messages");
    v("chat_date", chat_date, "the date that the template tells the model; null: 26 Jul 2024 in llama3, none in harmony");
    v("append_eod", append_eod, "end each document and completion with the end token, once");
    v("eod_id", eod_id, "end-of-document id; null: the tokenizer's, else none", limits::between(0, std::numeric_limits<int32_t>::max()));
    v("mask_eod_loss", mask_eod_loss, "no loss where the input token is the end of a document");
    v("reset_position_ids", reset_position_ids, "count positions from the start of the document; null: only in fine-tuning examples");
    v("document_mask", document_mask, "attention stops at document boundaries; null: only at those of fine-tuning examples");
  }
};

extern template const FieldType& detail::field_type<DataConfig>();

}  // namespace mantissa
