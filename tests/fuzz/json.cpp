// The readers of JSON against a second one: the grammar of RFC 8259, written down once more, with the promises of json/json.h.
#include "mantissa/json/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "mantissa/base/text.h"
#include "targets.h"

namespace mantissa::fuzz {
namespace {

using nlohmann::json;

class Grammar {
 public:
  explicit Grammar(std::string_view text) : text_(text) {}

  bool accepts() {
    space();
    const bool ok = value(0);
    space();
    return ok && at_ == text_.size() && !text_.starts_with("\xef\xbb\xbf");
  }
  // Numbers that parsers may refuse: those that may round to infinity and, in files that people write, integers that may exceed 64 bits.
  bool may_overflow() const { return may_overflow_; }
  bool has_long_integer() const { return long_integer_; }

 private:
  bool peek(char c) const { return at_ < text_.size() && text_[at_] == c; }
  bool take(char c) { return peek(c) && ++at_ > 0; }
  bool word(std::string_view expected) {
    if (!text_.substr(at_).starts_with(expected)) return false;
    at_ += expected.size();
    return true;
  }
  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }
  bool digits() {
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ > begin;
  }

  bool value(int depth) {
    if (take('{')) return depth < 32 && members(depth + 1);
    if (take('[')) return depth < 32 && entries(depth + 1);
    std::string ignored;
    if (peek('"')) return string(ignored);
    return word("true") || word("false") || word("null") || number();
  }
  bool number() {
    const size_t begin = at_;
    take('-');
    if (!take('0') && !digits()) return false;
    bool integer = true;
    if (take('.')) {
      integer = false;
      if (!digits()) return false;
    }
    if (take('e') || take('E')) {
      integer = false;
      if (!take('+')) take('-');
      if (!digits()) return false;
    }
    long_integer_ = long_integer_ || (integer && at_ - begin > 18);
    may_overflow_ = may_overflow_ || at_ - begin > 300 || exponent(begin) > 2;
    return true;
  }
  size_t exponent(size_t begin) const {
    const size_t e = text_.substr(begin, at_ - begin).find_first_of("eE");
    return e == std::string_view::npos ? 0 : at_ - begin - e - 1;
  }
  bool string(std::string& out) {
    if (!take('"')) return false;
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c == '"') return is_utf8(out);
      if (static_cast<unsigned char>(c) < 0x20) return false;
      if (c != '\\') out += c;
      if (c == '\\' && !escape(out)) return false;
    }
    return false;
  }
  bool escape(std::string& out) {
    if (at_ == text_.size()) return false;
    const char c = text_[at_++];
    const size_t known = std::string_view("\"\\/bfnrt").find(c);
    if (known != std::string_view::npos) {
      out += "\"\\/\b\f\n\r\t"[known];
      return true;
    }
    char32_t code = 0, low = 0;
    if (c != 'u' || !hex(code) || (code >= 0xdc00 && code < 0xe000)) return false;
    if (code >= 0xd800 && code < 0xdc00) {
      if (!word("\\u") || !hex(low) || low < 0xdc00 || low >= 0xe000) return false;
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(code, out);
    return true;
  }
  bool hex(char32_t& code) {
    for (int i = 0; i < 4; ++i, ++at_) {
      if (at_ == text_.size()) return false;
      const size_t digit = std::string_view("0123456789abcdefABCDEF").find(text_[at_]);
      if (digit == std::string_view::npos) return false;
      code = code * 16 + static_cast<char32_t>(digit < 16 ? digit : digit - 6);
    }
    return true;
  }
  bool members(int depth) {
    std::set<std::string> names;
    space();
    if (take('}')) return true;
    do {
      std::string name;
      space();
      if (!string(name) || !names.insert(name).second) return false;
      space();
      if (!take(':')) return false;
      space();
      if (!value(depth)) return false;
      space();
    } while (take(','));
    return take('}');
  }
  bool entries(int depth) {
    space();
    if (take(']')) return true;
    do {
      space();
      if (!value(depth)) return false;
      space();
    } while (take(','));
    return take(']');
  }

  std::string_view text_;
  size_t at_ = 0;
  bool may_overflow_ = false, long_integer_ = false;
};

// Returns the string or other value without entries that starts at the offset, as the second parser reads it.
json token_at(std::string_view text, size_t offset) {
  size_t end = text[offset] == '"' ? offset + 1 : std::min(text.find_first_of(" \t\r\n,:]}/", offset), text.size());
  if (text[offset] == '"') {
    while (text[end] != '"') end += text[end] == '\\' ? 2U : 1U;
    ++end;
  }
  return json::parse(text.substr(offset, end - offset));
}

// Returns true if every value is what the other parser read, and stands with its key where its place says.
bool same(const Json& value, const json& other, std::string_view text) {
  if (value.is_object() != other.is_object() || value.is_list() != other.is_array()) return false;
  if (!other.is_structured()) return value.dump() == other.dump() && token_at(text, value.place) == other;
  if (value.size() != other.size()) return false;
  if (value.is_list()) {
    return std::equal(other.begin(), other.end(), value.entries().begin(),
                      [&](const json& entry, const Json& own) { return same(own, entry, text); });
  }
  return std::ranges::all_of(value.members(), [&](const auto& member) {
    const auto& [name, own] = member;
    return other.contains(name) && token_at(text, own.key) == json(name) && same(own, other[name], text);
  });
}

}  // namespace

bool json_core(std::string_view input) {
  Json value;
  const bool taken = accepted([&] { value = parse_json(input, "text"); });
  Grammar grammar(input);
  const bool valid = grammar.accepts();
  promise(taken == valid || (valid && grammar.may_overflow()), "both parsers agree");
  const ParsedJson commented = parse_commented_json(input);
  promise(!taken || grammar.has_long_integer() || (commented.problems.empty() && commented.root == value),
          "what is strict JSON is also JSON for people");
  if (commented.problems.empty())
    promise(same(commented.root, json::parse(input, nullptr, true, true), input), "every value is at its place, comments or not");
  if (!taken) return false;
  const std::string again = value.dump();
  const Json second = parse_json(again, "again");
  promise(second == value && second.dump() == again && again == json::parse(input).dump(), "a value is read as it was written");
  return true;
}

}  // namespace mantissa::fuzz
