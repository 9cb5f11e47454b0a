// The tables of a tokenizer in a GGUF file, as llama.cpp reads them for byte pairs over bytes (tokenizer.ggml.model gpt2). llama.cpp knows
// a fixed number of expressions that cut texts, by name (tokenizer.ggml.pre); it normalizes nothing.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "hf/export_files.h"
#include "io/gguf_file.h"

namespace mantissa {

// A value of tokenizer.ggml.pre, which stands for parts of a tokenizer.json, and what llama.cpp makes of a text by it.
struct GgufSplit {
  const char* name;
  const char* expression = nullptr;  // in a Split before ByteLevel; null: ByteLevel has GPT-2's
  bool digits = false;               // first into single digits
  bool nfc = false;                  // files that are read are of tokenizers that normalize, which llama.cpp does not
  bool whole_words = false;          // a piece that is a token is that token, whatever merges make of it
  bool begins = false;               // the begin token stands before a text, unless tokenizer.ggml.add_bos_token says otherwise
  bool close = false;                // its classes of characters are others outside of ASCII
};

inline constexpr const char* kQwen2Split =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* kLlama3Split =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* kO200kSplit =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|)"
    R"(\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
inline constexpr const char* kTekkenSplit = R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|)"
                                            R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|)"
                                            R"(\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// An export has the first name of its expression.
inline constexpr std::array kGgufSplits = {
    GgufSplit{.name = "gpt-2"},
    GgufSplit{.name = "smollm", .digits = true},
    GgufSplit{.name = "qwen2", .expression = kQwen2Split, .nfc = true},
    GgufSplit{.name = "llama-bpe", .expression = kLlama3Split, .whole_words = true, .begins = true},
    GgufSplit{.name = "llama3", .expression = kLlama3Split, .whole_words = true, .begins = true},
    GgufSplit{.name = "llama-v3", .expression = kLlama3Split, .whole_words = true, .begins = true},
    GgufSplit{.name = "gpt-4o", .expression = kO200kSplit, .close = true},
    GgufSplit{.name = "tekken", .expression = kTekkenSplit, .whole_words = true, .begins = true, .close = true}};

inline constexpr const char* kNoGgufVocabulary = "no_vocab";  // tokenizer.ggml.model where there is none

inline constexpr const char* kGgufWithoutTokenizer =
    "llama-server and llama-cli cannot serve the file, only programs that call libllama with token ids";

// Sentences for the user of a file, each as "tokenizer.json: normalizer: llama.cpp ...".
struct GgufRemarks {
  std::vector<std::string> differences;  // llama.cpp computes otherwise than training, or cannot load: refused unless allowed
  std::vector<std::string> notes;        // it comes close
  bool has_tokenizer = true;
};

// Adds the tables, special tokens and the chat template; of a tokenizer that llama.cpp cannot read, and of a model without one, that there
// is none: llama.cpp then takes token ids alone. Throws Error(data) for files that are damaged, Error(usage) for a token beyond the
// vocabulary.
GgufRemarks add_gguf_tokenizer(const ExportFiles& files, int64_t vocab_size, GgufKeys& keys);

}  // namespace mantissa
