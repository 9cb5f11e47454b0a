// Regular expressions of tokenizers are written for Oniguruma (Ruby's syntax); PCRE2 matches them here.
#pragma once

#include <string>
#include <string_view>

namespace mantissa {

// Returns an expression with which PCRE2 (UTF, UCP) matches what Oniguruma matches with the given one. Throws Error(data) that begins with
// the construct for all that the two do not agree on, or that no published tokenizer has: \w, \b, \h, \S in a class, anchors, references,
// named groups, options other than (?i:...), nested classes, {,n}, and letters in (?i:...) that some characters fold to in pairs.
std::string pcre2_expression(std::string_view written);

// The expression that matches this text.
std::string pcre2_literal(std::string_view text);

}  // namespace mantissa
