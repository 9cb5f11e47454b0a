// Reads one source of token ids: a file of nanoGPT, llm.c, llmq or Megatron, or a text that is tokenized when it is opened. The readers in
// src/data/token_file.cpp define the byte formats. Headers are checked against the file size before anything is allocated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "data/documents.h"
#include "data/example.h"
#include "data/tokenizer.h"
#include "mantissa/data/data_config.h"

namespace mantissa {

// data.format auto: magic number; else a sibling .idx (Megatron); else extension .bin (nanoGPT); else what claims to be JSON (documents.h),
// which is never read as text; else valid UTF-8 (text); else Error(data) that names the first byte that is not.
DataFormat recognize_format(const InputFile& file, const Progressed& progressed = {});

enum class ElementType { u8, i8, i16, u16, i32, u32, i64 };
int64_t element_bytes(ElementType type);

struct TokenFileOptions {
  DataFormat format = DataFormat::automatic;
  TokenDtype dtype = TokenDtype::u16;              // data.dtype: nanoGPT files do not say
  const Tokenizer* tokenizer = nullptr;            // for text and JSONL
  int64_t vocab_size = 0;                          // ids must be below
  std::optional<int32_t> eod_id = {};              // ends a document in nanoGPT and llmq files, starts one in llm.c
  bool append_eod = false;                         // text and JSONL: each document ends with eod_id
  std::optional<ChatTemplate> chat_template = {};  // JSONL of messages
  std::optional<std::string> chat_date = {};
  int64_t row_tokens = 0;      // examples are packed into rows of so many tokens; 0: they follow each other
  Progressed progressed = {};  // called for each line of JSONL and each MiB of text while it is opened
};

// Marks what is known about a token beside its id.
enum TokenMark : uint8_t {
  starts_document = 1,
  ends_document = 2,
  end_token = 4,  // the id is eod_id
  untrained = 8,  // the prediction made from this token does not count: bit 0 of a llmq mask, or the next one is no target of an example
  fills_row = 16  // padding behind the examples of a row
};

// Counts the examples of JSONL (example.h), and what was cut off from those that are longer than a row.
struct ExampleCounts {
  int64_t examples = 0, targets = 0;
  int64_t cut_examples = 0, cut_targets = 0;
};

// Says where the tokens of a source lie.
struct TokenLayout {
  ElementType type = ElementType::u16;
  int64_t offset = 0;  // bytes before the first token
  int64_t tokens = 0;
  int64_t mask_offset = -1;                   // llmq: one bit per token from here on; -1: none
  std::vector<int64_t> document_starts = {};  // ascending; empty: only eod_id tells
  std::vector<std::byte> memory = {};         // text tokenized at opening; empty: read from the file
  std::vector<bool> trained = {};             // examples: the prediction made from this token counts; empty: all
  std::vector<bool> padding = {};             // examples: what fills their rows; empty: nothing does
  ExampleCounts examples = {};
  RepeatedTokens repeated = {};       // in text and examples
  std::optional<LineForm> form = {};  // form of the objects of JSONL
};

class TokenFile {
 public:
  // path: a file, or the prefix, .bin or .idx of a Megatron pair. Throws Error(usage) for a missing file or an option that does not fit the
  // format, Error(data) for a file that is torn, inconsistent or not what `format` says.
  TokenFile(const std::string& path, const TokenFileOptions& options);

  const std::string& path() const { return file_.path(); }
  DataFormat format() const { return format_; }
  int64_t tokens() const { return layout_.tokens; }
  // Returns whether document boundaries are known: from an index, from the text, or from eod_id.
  bool has_documents() const { return !layout_.document_starts.empty() || options_.eod_id.has_value(); }
  // Returns whether some tokens may be marked untrained.
  bool has_mask() const { return layout_.mask_offset >= 0 || !layout_.trained.empty(); }
  // Examples are separate sequences: none sees another. No examples: this is a stream of tokens.
  const ExampleCounts& examples() const { return layout_.examples; }
  const RepeatedTokens& repeated() const { return layout_.repeated; }
  std::optional<LineForm> form() const { return layout_.form; }  // the form of JSONL; no other format has one
  // Returns the files it was read from, for fingerprints.
  const std::vector<std::string>& files() const { return files_; }

  // Reads tokens [begin, begin + count) and, unless null, their TokenMarks. Throws Error(data) if an id is not in [0, vocab_size), naming
  // file and position (and data.dtype for nanoGPT), or if the file has become shorter. May be called by several threads at once.
  void read(int64_t begin, int64_t count, int32_t* out, uint8_t* marks = nullptr) const;

 private:
  void mark_indexed(int64_t begin, int64_t count, uint8_t* marks) const;
  void mark_masked(int64_t begin, int64_t count, uint8_t* marks) const;

  TokenFileOptions options_;
  InputFile file_;
  DataFormat format_;
  TokenLayout layout_;
  std::vector<std::string> files_;
};

// The width of ids that are kept in memory.
constexpr ElementType type_in_memory(int64_t vocab_size) { return vocab_size <= 65536 ? ElementType::u16 : ElementType::i32; }

// In documents.cpp. Tokenizes the whole text into memory, except that bytes of the byte tokenizer are read from the file. One document.
TokenLayout text_layout(const InputFile& file, const TokenFileOptions& options);
// Reads one JSON object a line: a text, which is one document, or an example (example.h).
TokenLayout jsonl_layout(const InputFile& file, const TokenFileOptions& options);

// "data/train.bin" gives "data/train.idx"; a path that ends neither in .bin nor .idx gets the ending appended.
std::string with_extension(const std::string& path, const std::string& extension);
bool file_exists(const std::string& path);

}  // namespace mantissa
