// Characters of text that is known to be UTF-8, and those of their properties that tokenizers ask for, from the one table of Unicode here
// (unicode_tables.inc): no system library has a say in them.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/text.h"

namespace mantissa {

// Returns the code point whose first byte is text[at], and moves `at` behind it.
inline char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<uint8_t>(text[i])); };
  const char32_t lead = byte(at++);
  if (lead < 0x80) return lead;
  const int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  char32_t character = lead & (0x3FU >> more);
  for (int i = 0; i < more; ++i) character = character << 6 | (byte(at++) & 0x3FU);
  return character;
}

// Calls take(character, begin, end) with the bytes of each character, in any text: what is no UTF-8 is U+FFFD.
template <class Take>
void for_each_character(std::string_view text, const Take& take) {
  Utf8Decoder decoder;
  size_t begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const Utf8Decoder::Status status = decoder.feed(static_cast<uint8_t>(text[i]));
    if (status == Utf8Decoder::Status::more && i + 1 < text.size()) continue;
    const bool valid = status == Utf8Decoder::Status::character;
    take(valid ? decoder.character() : char32_t{0xFFFD}, begin, i + 1);
    if (!valid) decoder = {};
    begin = i + 1;
  }
}

// Returns true if a character begins here.
inline bool begins_character(char byte) { return (static_cast<uint8_t>(byte) & 0xC0U) != 0x80U; }

inline constexpr char32_t kCodePoints = 0x110000;

// Test for White_Space; the categories N; ASCII punctuation or the categories P of Unicode 8, as in tokenizers; and \w of Rust's regex.
bool is_white_space(char32_t character);
bool is_numeric(char32_t character);
bool is_punctuation(char32_t character);
bool is_word_character(char32_t character);
// Returns the small letter of a capital; any other character itself.
char32_t lower_case(char32_t character);
// Tests for what str.isspace() and str.strip() of Python take as white space: four separators more than White_Space.
bool is_python_space(char32_t character);
size_t python_spaces_before(std::string_view text);  // bytes of those that it begins with
// Returns the text, which may be any, without what it begins and ends with of such characters.
std::string_view stripped(std::string_view text, const std::function<bool(char32_t)>& drops, bool left = true, bool right = true);

// Sets of code points, as ascending ranges that do not touch.
struct CodePointRange {
  char32_t first, last;
  auto operator<=>(const CodePointRange&) const = default;
};
using CodePoints = std::vector<CodePointRange>;

CodePoints united(CodePoints ranges);  // takes ranges in any order
CodePoints others(const CodePoints& points);
bool is_among(const CodePoints& points, char32_t character);
// Returns the code points of a category ("Lu") or of a group of them ("L"); none: there is no such name.
std::optional<CodePoints> code_points_of(std::string_view category);
const CodePoints& white_space();
// Returns \w of Oniguruma: Alphabetic, marks, decimal digits, connecting punctuation and, of Latin-1, superscripts and fractions.
CodePoints word_characters();

// The normal forms C and KC of Unicode (UAX #15), as tokenizers has them: those of Unicode 9, to which later characters mean nothing.
enum class NormalForm { composed, compatible };  // NFC, NFKC
// Returns a text in its normal form (normalizer.cpp). Characters that the tables lack stay as they are.
std::string in_normal_form(std::string_view text, NormalForm form);

// Classes of characters that an expression does not tell apart: PCRE2 matches texts of one byte a character, its class.
class CharacterClasses {
 public:
  // Divides all code points into as few classes as tell the sets apart. None: they are more than a byte can count.
  static std::optional<CharacterClasses> dividing(std::span<const CodePoints> sets);

  uint8_t class_of(char32_t character) const { return pages_[page_of_[character / kPage]][character % kPage]; }
  // Returns the classes that make up a set, which is one of those divided, or a union of such.
  std::vector<uint8_t> classes_of(const CodePoints& set) const;
  // Writes the classes of a text's characters.
  void classify(std::string_view text, std::string& classes) const;

 private:
  static constexpr size_t kMost = 256, kPage = 256;
  struct Interval {
    char32_t first;
    size_t id;
  };
  using Partition = std::vector<Interval>;  // ascending; each ends where the next begins, the last with the last code point
  static Partition refined(const Partition& partition, const CodePoints& set, size_t& classes);
  explicit CharacterClasses(const Partition& partition, size_t classes);

  std::vector<char32_t> members_;  // one of each class
  std::vector<uint16_t> page_of_;
  std::vector<std::array<uint8_t, kPage>> pages_;  // pages of one class are shared
};

}  // namespace mantissa
