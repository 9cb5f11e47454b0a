// The decoder of a tokenizer.json: makes a text of tokens.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "mantissa/json/json_fields.h"
#include "mantissa/text/split_pattern.h"

namespace mantissa {

class TextDecoder {
 public:
  TextDecoder() = default;
  // Reads null, ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip or a Sequence of them. Throws Error(data) with the place of any
  // other.
  static TextDecoder from(const JsonReader& json);

  // Returns UTF-8; bytes that are none become U+FFFD. Without a decoder, spaces stand between tokens, as tokenizers has it.
  std::string decode(std::vector<std::string> tokens) const;
  // Returns true if ByteFallback takes the token for a byte.
  bool takes_for_byte(std::string_view token) const;

 private:
  struct ByteLevel {};
  struct ByteFallback {};
  struct Fuse {};
  struct Metaspace {
    SplitPattern pattern;  // matches the replacement
    bool prepends;
  };
  struct Replace {
    SplitPattern pattern;
    std::string content;
  };
  struct Strip {
    std::string content;
    int64_t start, stop;
  };
  using Step = std::variant<ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip>;
  void add_steps(const JsonReader& json);
  static void apply(const ByteLevel& step, std::vector<std::string>& tokens);
  static void apply(const ByteFallback& step, std::vector<std::string>& tokens);
  static void apply(const Fuse& step, std::vector<std::string>& tokens);
  static void apply(const Metaspace& step, std::vector<std::string>& tokens);
  static void apply(const Replace& step, std::vector<std::string>& tokens);
  static void apply(const Strip& step, std::vector<std::string>& tokens);

  std::vector<Step> steps_;
};

// Returns the text with U+FFFD for what is no UTF-8: one for each longest beginning of a character, as Unicode recommends and Rust does.
std::string lossy_utf8(std::string_view bytes);

}  // namespace mantissa
