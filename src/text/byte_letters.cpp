// ByteLevel spells bytes with letters that can be printed: bytes 33 to 126, 161 to 172 and 174 to 255 with the characters of the same
// number, the other 68, in order, with those from U+0100 (GPT-2's bytes_to_unicode).
#include <array>

#include "mantissa/base/utf8.h"
#include "mantissa/text/bpe_model.h"
#include "text/characters.h"

namespace mantissa {
namespace {

constexpr bool is_printable_byte(int byte) { return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174; }

struct ByteLetters {
  std::array<char32_t, 256> letters{};
  std::array<int, 324> bytes{};  // by letter; -1: none

  constexpr ByteLetters() {
    bytes.fill(-1);
    char32_t other = 0x100;
    for (int byte = 0; byte < 256; ++byte) {
      const char32_t letter = is_printable_byte(byte) ? static_cast<char32_t>(byte) : other++;
      letters[static_cast<size_t>(byte)] = letter;
      bytes[letter] = byte;
    }
  }
};

constexpr ByteLetters kByteLetters;

}  // namespace

std::optional<std::string> bytes_of_letters(std::string_view spelled) {
  std::string out;
  for (size_t at = 0; at < spelled.size();) {
    const char32_t letter = next_character(spelled, at);
    if (letter >= kByteLetters.bytes.size() || kByteLetters.bytes[letter] < 0) return std::nullopt;
    out += static_cast<char>(kByteLetters.bytes[letter]);
  }
  return out;
}

std::string letters_of_bytes(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) append_utf8(kByteLetters.letters[static_cast<uint8_t>(byte)], out);
  return out;
}

}  // namespace mantissa
