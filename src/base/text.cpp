#include "mantissa/base/text.h"

#include <algorithm>

namespace mantissa {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string shortened(std::string_view text, size_t most) {
  constexpr size_t kLongestCharacter = 4;  // bytes that are no UTF-8 could continue one character for ever
  size_t characters = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool starts = !continues_character(text[i]);
    if ((starts && characters == most) || i == most * kLongestCharacter) return std::string(text.substr(0, i)) + "...";
    characters += starts;
  }
  return std::string(text);
}

}  // namespace mantissa
