// Regular expressions of tokenizers are written for Oniguruma (Ruby's syntax); PCRE2 matches them here, without any notion of characters:
// those of a class, an escape or a letter are a set of code points.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "text/characters.h"

namespace mantissa {

// Syntax that PCRE2 and Oniguruma agree on, or "" where one character of a set stands.
struct PatternPart {
  std::string syntax;
  int32_t set = -1;  // its index in PatternParts::sets
};

// An expression of few bytes has many parts, and a set such as \w takes thousands of times the bytes of its name: parts share the sets.
class PatternParts {
 public:
  void add(std::string_view syntax) { parts_.push_back({.syntax = std::string(syntax)}); }
  void add(CodePoints characters);

  const std::vector<PatternPart>& parts() const { return parts_; }
  const std::vector<CodePoints>& sets() const { return sets_; }  // which differ

 private:
  std::vector<PatternPart> parts_;
  std::vector<CodePoints> sets_;
  std::map<CodePoints, int32_t> indices_;
};

// Returns the parts of an expression, which is UTF-8. Throws Error(data) that begins with the construct for all that the two do not agree
// on, or that no published tokenizer has: \b, \h, anchors, references, named groups, options other than (?i:...), nested classes, {,n}, and
// letters in (?i:...) that some characters fold to in pairs.
PatternParts pattern_parts(std::string_view expression);

// Returns the parts of an expression that matches this text.
PatternParts literal_parts(std::string_view text);

}  // namespace mantissa
