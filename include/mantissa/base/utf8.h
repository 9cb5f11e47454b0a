// Decodes UTF-8 by bytes, strictly (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace mantissa {

// Takes one byte after another, so a character may span two windows of a file.
class Utf8Decoder {
 public:
  enum class Status { character, more, invalid };

  Status feed(uint8_t byte);
  char32_t character() const { return value_; }
  bool between_characters() const { return missing_ == 0; }

 private:
  Status lead(uint8_t byte);

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

}  // namespace mantissa
