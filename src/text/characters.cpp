#include "text/characters.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>

namespace mantissa {
namespace {

utf8proc_category_t category_of(char32_t character) { return utf8proc_category(static_cast<utf8proc_int32_t>(character)); }

bool is_letter_or_mark(utf8proc_category_t category) { return category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_ME; }

struct CharacterRange {
  char32_t first, last;
};

template <size_t n>
bool is_within(const std::array<CharacterRange, n>& ranges, char32_t character) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [&](const CharacterRange& one) { return character >= one.first && character <= one.last; });
}

}  // namespace

bool is_white_space(char32_t character) {
  static constexpr std::array<CharacterRange, 10> kRanges = {{{0x09, 0x0D},
                                                              {0x20, 0x20},
                                                              {0x85, 0x85},
                                                              {0xA0, 0xA0},
                                                              {0x1680, 0x1680},
                                                              {0x2000, 0x200A},
                                                              {0x2028, 0x2029},
                                                              {0x202F, 0x202F},
                                                              {0x205F, 0x205F},
                                                              {0x3000, 0x3000}}};
  return is_within(kRanges, character);
}

bool is_numeric(char32_t character) {
  const utf8proc_category_t category = category_of(character);
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(char32_t character) {
  static constexpr std::array<CharacterRange, 4> kAscii = {{{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}}};
  const utf8proc_category_t category = category_of(character);
  return is_within(kAscii, character) || (category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO);
}

bool is_word_character(char32_t character) {
  // Symbols that are alphabetic (circled and squared letters), and the joiners.
  static constexpr std::array<CharacterRange, 5> kOthers = {
      {{0x200C, 0x200D}, {0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}}};
  const utf8proc_category_t category = category_of(character);
  return is_letter_or_mark(category) || category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_PC || is_within(kOthers, character);
}

}  // namespace mantissa
