// Joins and splits short texts.
#pragma once

#include <cstddef>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mantissa {

// Returns the parts written one after the other, as by operator<<.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// Returns "a, b, c": what `shown` makes of each item, as by operator<<.
template <class Items, class Shown = std::identity>
std::string joined(const Items& items, const char* separator = ", ", const Shown& shown = {}) {
  std::ostringstream out;
  const char* between = "";
  for (const auto& item : items) out << std::exchange(between, separator) << std::invoke(shown, item);
  return std::move(out).str();
}

// Returns the parts between separators, n + 1 for n of them.
std::vector<std::string> split(std::string_view text, char separator);

// Returns "1 thread", "2 threads".
template <class T>
std::string count_text(T count, const char* noun) {
  return text(count, ' ', noun, count == 1 ? "" : "s");
}

// Returns whether a byte of UTF-8 is a character's second or later one.
constexpr bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

// Returns at most `most` characters of the text; "..." stands for the rest. UTF-8 sequences stay whole.
constexpr size_t kShownCharacters = 60;
std::string shortened(std::string_view text, size_t most = kShownCharacters);

}  // namespace mantissa
