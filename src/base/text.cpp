#include "mantissa/base/text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iomanip>

namespace mantissa {

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(separator, begin), text.size());
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string shortened(std::string_view text, size_t most) {
  constexpr size_t kLongestCharacter = 4;  // bytes that are no UTF-8 could continue one character for ever
  size_t characters = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool starts = !continues_character(text[i]);
    if ((starts && characters == most) || i == most * kLongestCharacter) return std::string(text.substr(0, i)) + "...";
    characters += starts;
  }
  return std::string(text);
}

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

Utf8Decoder::Status Utf8Decoder::feed(uint8_t byte) {
  if (missing_ == 0 && byte < 0x80) {
    value_ = byte;
    return Status::character;
  }
  if (missing_ == 0) {
    if (byte < 0xC2 || byte > 0xF4) return Status::invalid;
    missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
    value_ = byte & (0x3FU >> missing_);
    smallest_ = missing_ == 1 ? 0x80U : missing_ == 2 ? 0x800U : 0x10000U;
    return Status::more;
  }
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

namespace {

// Returns where the character begins that has the byte `at`.
size_t character_at(std::string_view text, size_t at) {
  while (at > 0 && continues_character(text[at])) --at;
  return at;
}

}  // namespace

std::string printable(std::string_view text, std::string_view line_end) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    Utf8Decoder decoder;
    auto status = Utf8Decoder::Status::more;
    size_t bytes = 0;
    while (status == Utf8Decoder::Status::more && bytes < text.size()) status = decoder.feed(static_cast<uint8_t>(text[bytes++]));
    if (status == Utf8Decoder::Status::character && !is_control(decoder.character())) {
      out += text.substr(0, bytes);
    } else {
      bytes = 1;
      std::array<char, 8> escape{};
      std::snprintf(escape.data(), escape.size(), "\\x%02x", static_cast<unsigned char>(text.front()));
      out += text.front() == '\n' ? line_end : escape.data();
    }
    text.remove_prefix(bytes);
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

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    before_last = std::exchange(last, row);
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
  }
  return row[b.size()];
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  constexpr size_t kShortestPrefix = 3, kLongest = 256;  // the cost is the product of the lengths, and the name comes from a file
  if (name.size() > kLongest) return "";
  std::string best;  // first the shortest that begins with the name: "mxfp4" means mxfp4_qat rather than mxfp8
  for (const std::string& candidate : candidates) {
    const bool begins = name.size() >= kShortestPrefix && candidate.starts_with(name);
    if (begins && (best.empty() || candidate.size() < best.size())) best = candidate;
  }
  if (!best.empty()) return best;
  size_t least = 3;
  for (const std::string& candidate : candidates) {
    const size_t longer = std::max(name.size(), candidate.size()), shorter = std::min(name.size(), candidate.size());
    if (longer - shorter >= least) continue;  // as many edits at least
    const size_t distance = edit_distance(name, candidate);
    if (distance < least && distance < std::min(name.size(), candidate.size())) {
      least = distance;
      best = candidate;
    }
  }
  if (!best.empty()) return best;
  const auto prefix = std::ranges::find_if(
      candidates, [&](const std::string& candidate) { return candidate.size() >= kShortestPrefix && name.starts_with(candidate); });
  return prefix != candidates.end() ? *prefix : "";
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string nearest = nearest_name(name, candidates);
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

std::string bytes_text(int64_t bytes) {
  constexpr std::array kUnits = {" KiB", " MiB", " GiB", " TiB", " PiB", " EiB"};
  if (bytes < 1024) return text(bytes, " B");
  size_t unit = 0;
  double value = std::ldexp(static_cast<double>(bytes), -10);
  for (; value >= 1024.0 && unit + 1 < kUnits.size(); ++unit) value = std::ldexp(value, -10);
  return text(std::fixed, std::setprecision(1), value, kUnits[unit]);
}

}  // namespace mantissa
