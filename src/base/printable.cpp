#include "mantissa/base/printable.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace mantissa {
namespace {

unsigned char byte_of(char c) { return static_cast<unsigned char>(c); }

// Bytes of the character that the text begins with; 0 if it is a control character or none.
size_t printable_bytes(std::string_view text) {
  const unsigned char lead = byte_of(text.front());
  if (lead < 0x80) return lead >= 0x20 && lead != 0x7f ? 1 : 0;
  const size_t bytes = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (bytes == 0 || text.size() < bytes) return 0;
  const bool whole =
      std::all_of(text.begin() + 1, text.begin() + static_cast<std::ptrdiff_t>(bytes), [](char c) { return (byte_of(c) & 0xc0) == 0x80; });
  const bool control = lead == 0xc2 && byte_of(text[1]) < 0xa0;  // C1: U+0080 to U+009F
  return whole && !control ? bytes : 0;
}

}  // namespace

std::string printable(std::string_view text, std::string_view line_end) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = printable_bytes(text);
    if (bytes > 0) {
      out += text.substr(0, bytes);
    } else if (text.front() == '\n') {
      out += line_end;
    } else {
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\x%02x", byte_of(text.front()));
      out += escape.data();
    }
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return out;
}

}  // namespace mantissa
