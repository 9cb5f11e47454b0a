// The normalizer of a tokenizer.json: changes a text before it is cut.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "json/json_fields.h"
#include "text/split_pattern.h"

namespace mantissa {

inline constexpr size_t kMostTokenizerSteps = 64;  // steps of a normalizer, a pretokenizer or a decoder; published ones have up to six

class Normalizer {
 public:
  Normalizer() = default;
  // Reads null, NFC, NFKC, Prepend, Replace, Lowercase, Strip or a Sequence of them. Throws Error(data) with the place of any other.
  static Normalizer from(const JsonReader& json);

  std::string apply(std::string_view text) const;
  // of_first: takes the number of bytes at the beginning of the text that come from its first character, and returns that of the result.
  std::string apply(std::string_view text, size_t& of_first) const;
  bool changes_nothing() const { return steps_.empty(); }
  // Returns true if a text may be normalized in parts that are cut before characters of ASCII.
  bool works_on_parts() const;

 private:
  struct Compose {
    bool compatible;  // NFKC, not NFC
  };
  struct Lowercase {};
  struct Prepend {
    std::string text;
  };
  struct Replace {
    SplitPattern pattern;
    std::string content;
  };
  struct Strip {
    bool left, right;
  };
  using Step = std::variant<Compose, Lowercase, Prepend, Replace, Strip>;
  static void add_steps(const JsonReader& json, std::vector<Step>& steps);
  static std::string applied(const Compose& step, const std::string& text, size_t& of_first);
  static std::string applied(const Lowercase& step, const std::string& text, size_t& of_first);
  static std::string applied(const Prepend& step, const std::string& text, size_t& of_first);
  static std::string applied(const Replace& step, const std::string& text, size_t& of_first);
  static std::string applied(const Strip& step, const std::string& text, size_t& of_first);

  std::vector<Step> steps_;
};

// Reads {"String": "..."} or {"Regex": "..."}. Throws Error(data) with its place.
SplitPattern split_pattern(const JsonReader& json);

// Returns the text with `content` in the place of each match.
std::string replaced(PatternMatcher& matcher, std::string_view content, std::string_view text);

}  // namespace mantissa
