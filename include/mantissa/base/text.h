// Makes short texts and takes them apart: joins, splits, decodes UTF-8, escapes, finds the name that was meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
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

// Decodes UTF-8 by bytes, strictly (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.

// Takes one byte after another, so a character may span two windows of a file.
class Utf8Decoder {
 public:
  enum class Status { character, more, invalid };

  Status feed(uint8_t byte);
  char32_t character() const { return value_; }
  bool between_characters() const { return missing_ == 0; }

 private:
  char32_t value_ = 0, smallest_ = 0;
  int missing_ = 0;
};

bool is_utf8(std::string_view text);

// Returns the length of the text without a character that is cut off at its end.
size_t whole_characters(std::string_view text);

// Appends the 1 to 4 bytes of a Unicode scalar value.
void append_utf8(char32_t character, std::string& out);

inline bool is_unicode_scalar(uint64_t value) { return value < 0xD800 || (value > 0xDFFF && value <= 0x10FFFF); }
inline bool is_control(char32_t character) { return character < 0x20 || (character >= 0x7F && character < 0xA0); }

// Returns "U+00E9", with the character itself in quotes if it is printable.
std::string describe_character(char32_t character);
// Describes ascending characters: "\n space ! 0-9 A-Z a c", at most 40 entries, then "and 17 more".
std::string describe_characters(std::span<const char32_t> ascending);

// Makes text of others (paths, names, messages) safe for lines on a terminal or in a log: it must neither control the one nor forge a line
// of the other.

// Escapes control characters, those of C1 among them, and bytes that are no UTF-8 as \xNN; a line end becomes `line_end`.
std::string printable(std::string_view text, std::string_view line_end = "\\x0a");

// Both take a byte for a column, which no character exceeds, keep UTF-8 sequences whole, and expect printable() text. without_middle()
// returns at most `most` bytes, with "..." for the middle.
std::string without_middle(std::string_view text, size_t most);
// Breaks a line into lines of at most `most` bytes (7 or more), at the last space that fits, behind a number only if need be, else
// anywhere; indented.
std::string folded(std::string_view line, size_t most);

// Finds the name a person most likely meant, for "did you mean".

// Returns the number of edits between two names: insert, delete, replace, swap of neighbors (optimal string alignment, the usual form of
// Damerau-Levenshtein).
size_t edit_distance(std::string_view a, std::string_view b);

// Returns the candidate nearest to the name: at most two edits away and fewer than its length, else one of which the name is a prefix (of
// at least three letters) or the reverse; "" if there is none. Ties go to the first.
std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

// Returns "; did you mean 'x'?" or "".
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

// Returns "512 B", "1.5 KiB", "4.5 GiB": in the largest of B, KiB, ... EiB of which there is at least one. bytes must not be negative.
std::string bytes_text(int64_t bytes);

}  // namespace mantissa
