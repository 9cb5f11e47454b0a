// Cuts a template into texts and the words of its tags.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mantissa {

// Texts are without what the tags beside them take along.
struct JinjaToken {
  enum class Kind { text, word, number, string, sign, block, block_end, output, output_end, end };
  Kind kind = Kind::end;
  std::string text = {};
  int line = 0;
};
using JinjaTokens = std::vector<JinjaToken>;

// Throws Error(data) for a tag, comment or string without an end, and for a template of more than 1 MiB.
JinjaTokens jinja_tokens(std::string_view source);

}  // namespace mantissa
