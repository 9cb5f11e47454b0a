// Trains a byte pair encoding (Sennrich et al. 2016) on texts and writes it as a tokenizer.json that tokenizers reads, too: bytes, cut as
// Llama 3 cuts text, and behind them <|endoftext|> and the tokens asked for.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "mantissa/json/json.h"
#include "text/bpe_tokenizer.h"
#include "text/pretokenizer.h"

namespace mantissa {

// The tokenizer.json files that mantissa makes: of trained tokenizers, and of byte and char tokenizers in exports.

// Members in which such files differ, named as in the file.
struct TokenizerParts {
  Json vocab;
  Json merges = Json::Entries();
  Json added_tokens = Json::Entries();
  Json pre_tokenizer = {};
  Json decoder = {};
};

// Returns a file with a BPE model and nothing else but these parts.
Json tokenizer_file(const TokenizerParts& parts);

// Returns the part ByteLevel, of pretokenizers and decoders, which leaves cutting to others.
Json byte_level_part();

// The end token of trained tokenizers, and of others whose tokenizer_config.json is missing, if they have it; GPT-2's.
inline constexpr const char* kDefaultEndToken = "<|endoftext|>";

class BpeTrainer {
 public:
  static constexpr int64_t kFewestTokens = 257;  // the bytes and the end token; added tokens come on top

  BpeTrainer();
  ~BpeTrainer();

  // Adds a part of a text, which may end anywhere. Throws Error(origin.code) where it is not UTF-8; origin.offset is that of the part.
  void add(std::string_view part, const TextOrigin& origin);
  void end_text(const TextOrigin& origin);

  // Returns the file. Among equally frequent pairs, the one of the lower ids is merged first. There are fewer tokens than asked for where
  // no pair occurs twice. Throws Error(usage) below kFewestTokens and the number of added tokens, whose ids are set.
  std::string train(int64_t vocab_size, std::vector<AddedToken> added = {}) const;

 private:
  void count(bool text_goes_on);

  struct Text;
  std::unique_ptr<Text> text_;
  std::unordered_map<std::string, int64_t> words_;  // and how often each occurs
};

}  // namespace mantissa
