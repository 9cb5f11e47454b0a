// Classes of characters that an expression does not tell apart: PCRE2 matches texts of one byte a character, its class.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/characters.h"

namespace mantissa {

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
