#include "mantissa/base/printable.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "mantissa/base/text.h"
#include "mantissa/base/utf8.h"

namespace mantissa {
namespace {

// Returns where the character begins that has the byte `at`.
size_t character_at(std::string_view text, size_t at) {
  while (at > 0 && continues_character(text[at])) --at;
  return at;
}

// Returns the bytes of the character that the text begins with; 0 if it is a control character or none.
size_t printable_bytes(std::string_view text) {
  Utf8Decoder decoder;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto status = decoder.feed(static_cast<uint8_t>(text[i]));
    if (status == Utf8Decoder::Status::invalid) return 0;
    if (status == Utf8Decoder::Status::character) return is_control(decoder.character()) ? 0 : i + 1;
  }
  return 0;
}

// Returns "\x1b".
std::string escaped_byte(char byte) {
  std::array<char, 8> escape{};
  std::snprintf(escape.data(), escape.size(), "\\x%02x", static_cast<unsigned char>(byte));
  return escape.data();
}

// Returns how the character that the text begins with is shown; it has `bytes`, 0 if it is a control character or none.
std::string printable_piece(std::string_view text, size_t bytes, std::string_view line_end) {
  if (bytes > 0) return std::string(text.substr(0, bytes));
  if (text.front() == '\n') return std::string(line_end);
  return escaped_byte(text.front());
}

}  // namespace

std::string printable(std::string_view text, std::string_view line_end) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const size_t bytes = printable_bytes(text);
    out += printable_piece(text, bytes, line_end);
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return out;
}

std::string without_middle(std::string_view text, size_t most) {
  constexpr std::string_view kCut = "...";
  if (text.size() <= most) return std::string(text);
  if (most <= kCut.size()) return std::string(kCut.substr(0, most));
  const size_t head = character_at(text, (most - kCut.size() + 1) / 2);
  size_t tail = text.size() - (most - kCut.size()) / 2;
  while (tail < text.size() && continues_character(text[tail])) ++tail;
  return std::string(text.substr(0, head)).append(kCut).append(text.substr(tail));
}

namespace {

// Returns where to break a line: the last space up to `width` that follows no number, else the last one; npos: there is none.
size_t last_break(std::string_view line, size_t width) {
  const size_t last = line.find_last_of(' ', width);
  for (size_t space = last; space != std::string_view::npos && space > 0; space = line.find_last_of(' ', space - 1)) {
    if (line[space - 1] < '0' || line[space - 1] > '9') return space;
  }
  return last;
}

}  // namespace

std::string folded(std::string_view line, size_t most) {
  constexpr std::string_view kIndent = "  ";
  std::string out;
  for (size_t width = most; line.size() > width; width = most - kIndent.size()) {
    const size_t space = last_break(line, width);
    const bool at_space = space != std::string_view::npos && space > 0;
    const size_t end = at_space ? space : character_at(line, width);
    out.append(line.substr(0, end)).append("\n").append(kIndent);
    line.remove_prefix(at_space ? end + 1 : end);
  }
  return out.append(line) + '\n';
}

}  // namespace mantissa
