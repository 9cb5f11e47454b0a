// Converts text to token ids and back. There are two kinds: `byte` (256 ids, the byte values) and `char` (one id per distinct Unicode
// character of the training data, in order of code points, as nanoGPT numbers them). Neither has special tokens; an end-of-document id
// comes from data.eod_id.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/progressed.h"
#include "mantissa/json/fields.h"

namespace mantissa {

class InputFile;

// Says where a text comes from, for the message of an error and its code: a prompt is usage, a file is data.
struct TextOrigin {
  std::string name = "the text";
  ExitCode code = ExitCode::usage;
  int64_t offset = 0;  // of the text's first byte in what it comes from
};

enum class TokenizerKind { byte, character };
constexpr auto choices(TokenizerKind) { return std::array{Choice{"byte", TokenizerKind::byte}, Choice{"char", TokenizerKind::character}}; }

class Tokenizer {
 public:
  static Tokenizer bytes();
  // Throws Error(data) unless strictly ascending Unicode scalar values, at least one.
  static Tokenizer characters(std::vector<char32_t> ascending);
  // Collects the distinct characters of the files. Throws Error(data), with the position, where one is not UTF-8.
  static Tokenizer characters_of(std::span<const InputFile> files, const Progressed& progressed = {});

  // Write and read {"type": "byte"} or {"type": "char", "characters": [10, 32, ...]} (code points by id). from_json throws Error(data) with
  // `name`.
  std::string to_json() const;
  static Tokenizer from_json(std::string_view json, const std::string& name);

  // Reads nanoGPT's meta.pkl as JSON: {"itos": {"0": "\n", "1": " ", ...}, ...}, ids in order of code points. Throws Error(data) with
  // `name`.
  static Tokenizer from_nanogpt_meta(std::string_view json, const std::string& name);

  TokenizerKind kind() const { return kind_; }
  int64_t size() const;  // ids are 0 .. size()-1

  // Throws Error(origin.code) naming the character and its byte position if it is not in the vocabulary, or where the text is not UTF-8.
  std::vector<int32_t> encode(std::string_view text, const TextOrigin& origin = {}) const;

  // Returns bytes of UTF-8. An id without a token (a vocabulary larger than the tokenizer's) becomes U+FFFD.
  std::string decode(std::span<const int32_t> ids) const;

 private:
  explicit Tokenizer(TokenizerKind kind) : kind_(kind) {}

  TokenizerKind kind_;
  std::vector<char32_t> characters_;  // ascending; the index is the id
  std::vector<int32_t> id_of_;        // by code point up to the largest; -1: none
};

}  // namespace mantissa
