// The tokenizer.json files that mantissa makes: of trained tokenizers, and of byte and char tokenizers in exports.
#pragma once

#include "mantissa/json/json.h"

namespace mantissa {

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

}  // namespace mantissa
