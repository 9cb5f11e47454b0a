// Characters of text that is known to be UTF-8, and the properties of theirs that tokenizers ask for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace mantissa {

// The code point whose first byte is text[at], which `at` then lies behind.
inline char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<uint8_t>(text[i])); };
  const char32_t lead = byte(at++);
  if (lead < 0x80) return lead;
  const int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
  char32_t character = lead & (0x3FU >> more);
  for (int i = 0; i < more; ++i) character = character << 6 | (byte(at++) & 0x3FU);
  return character;
}

// Whether a character begins here.
inline bool begins_character(char byte) { return (static_cast<uint8_t>(byte) & 0xC0U) != 0x80U; }

// By utf8proc: the property White_Space; the categories N; ASCII punctuation or the categories P; what \w is in Rust's regex.
bool is_white_space(char32_t character);
bool is_numeric(char32_t character);
bool is_punctuation(char32_t character);
bool is_word_character(char32_t character);

}  // namespace mantissa
