// The normalizer of a tokenizer.json: changes a text before it is cut.
#pragma once

#include <functional>
#include <string>
#include <string_view>
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
  // Returns true if a text may be normalized in parts that are cut before characters of ASCII.
  bool works_on_parts() const { return works_on_parts_; }

 private:
  using Step = std::function<std::string(const std::string& text, size_t& of_first)>;
  void add_steps(const JsonReader& json);

  std::vector<Step> steps_;
  bool works_on_parts_ = true;
};

// Reads {"String": "..."} or {"Regex": "..."}. Throws Error(data) with its place.
SplitPattern split_pattern(const JsonReader& json);

// Returns the text with `content` in the place of each match.
std::string replaced(PatternMatcher& matcher, std::string_view content, std::string_view text);

}  // namespace mantissa
