// Regular expressions of tokenizers are written for Oniguruma (Ruby's syntax); PCRE2 matches them here, without any notion of characters:
// those of a class, an escape or a letter are a set of code points.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/characters.h"

namespace mantissa {

// A set of which one character stands here, or else syntax that PCRE2 and Oniguruma agree on.
struct PatternPart {
  std::string syntax;
  std::optional<CodePoints> characters;
};
using PatternParts = std::vector<PatternPart>;

// Returns the parts of an expression, which is UTF-8. Throws Error(data) that begins with the construct for all that the two do not agree
// on, or that no published tokenizer has: \b, \h, anchors, references, named groups, options other than (?i:...), nested classes, {,n}, and
// letters in (?i:...) that some characters fold to in pairs.
PatternParts pattern_parts(std::string_view expression);

// Returns the parts of an expression that matches this text.
PatternParts literal_parts(std::string_view text);

}  // namespace mantissa
