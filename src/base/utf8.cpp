#include "mantissa/base/utf8.h"

#include <cstdio>

#include "mantissa/base/text.h"

namespace mantissa {
namespace {

// Letters and digits make ranges that a person reads, punctuation does not.
bool makes_range(char32_t first, char32_t second) {
  const auto among = [&](char32_t from, char32_t to) { return first >= from && second <= to; };
  return second == first + 1 && (among('0', '9') || among('A', 'Z') || among('a', 'z') || among(0xA0, 0x10FFFF));
}

std::string list_entry(char32_t character) {
  if (character == '\n') return "\\n";
  if (character == ' ') return "space";
  if (is_control(character)) return describe_character(character);
  std::string out;
  append_utf8(character, out);
  return out;
}

}  // namespace

Utf8Decoder::Status Utf8Decoder::lead(uint8_t byte) {
  if (byte < 0x80) {
    value_ = byte;
    return Status::character;
  }
  if (byte < 0xC2 || byte > 0xF4) return Status::invalid;
  missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  value_ = byte & (0x3FU >> missing_);
  smallest_ = missing_ == 1 ? 0x80U : missing_ == 2 ? 0x800U : 0x10000U;
  return Status::more;
}

Utf8Decoder::Status Utf8Decoder::feed(uint8_t byte) {
  if (missing_ == 0) return lead(byte);
  if ((byte & 0xC0) != 0x80) return Status::invalid;
  value_ = (value_ << 6) | (byte & 0x3FU);
  if (--missing_ > 0) return Status::more;
  return value_ >= smallest_ && is_unicode_scalar(value_) ? Status::character : Status::invalid;
}

bool is_utf8(std::string_view text) {
  Utf8Decoder decoder;
  for (const char c : text) {
    if (decoder.feed(static_cast<uint8_t>(c)) == Utf8Decoder::Status::invalid) return false;
  }
  return decoder.between_characters();
}

size_t whole_characters(std::string_view text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<uint8_t>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

void append_utf8(char32_t character, std::string& out) {
  const auto put = [&out](char32_t bits) { out.push_back(static_cast<char>(static_cast<uint8_t>(bits))); };
  if (character < 0x80) return put(character);
  if (character < 0x800) {
    put(0xC0 | (character >> 6));
  } else if (character < 0x10000) {
    put(0xE0 | (character >> 12));
    put(0x80 | ((character >> 6) & 0x3F));
  } else {
    put(0xF0 | (character >> 18));
    put(0x80 | ((character >> 12) & 0x3F));
    put(0x80 | ((character >> 6) & 0x3F));
  }
  put(0x80 | (character & 0x3F));
}

std::string describe_character(char32_t character) {
  char code[16];
  std::snprintf(code, sizeof code, "U+%04X", static_cast<unsigned>(character));
  std::string out = code;
  if (is_control(character)) return out;
  out += " '";
  append_utf8(character, out);
  return out + "'";
}

std::string describe_characters(std::span<const char32_t> ascending) {
  constexpr size_t kShown = 40;
  std::vector<std::string> entries;
  size_t next = 0;
  for (size_t shown = 0; next < ascending.size() && shown < kShown; ++shown, ++next) {
    const size_t first = next;
    while (next + 1 < ascending.size() && makes_range(ascending[next], ascending[next + 1])) ++next;
    if (next == first + 1) --next;  // a pair is no range
    entries.push_back(list_entry(ascending[first]));
    if (next > first) entries.back() += "-" + list_entry(ascending[next]);
  }
  return joined(entries, " ") + (next < ascending.size() ? text(" and ", ascending.size() - next, " more") : "");
}

}  // namespace mantissa
