#include "text/pattern_syntax.h"

#include <algorithm>
#include <array>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/base/printable.h"

namespace mantissa {
namespace {

// Unicode's White_Space, which \s is in Oniguruma; PCRE2 counts U+180E as well.
constexpr std::string_view kSpaces = R"(\x09-\x0d\x20\x85\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";
constexpr std::array<std::string_view, 37> kCategories = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Mn", "Mc", "Me", "N",  "Nd", "Nl",
                                                          "No", "P",  "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
                                                          "So", "Z",  "Zs", "Zl", "Zp", "C",  "Cc", "Cf", "Cs", "Co", "Cn"};
// What single characters (U+00DF, the ligatures from U+FB00) fold to: Oniguruma lets them match these letters where case is ignored.
constexpr std::array<std::string_view, 5> kFoldedPairs = {"ss", "ff", "fi", "fl", "st"};

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
bool is_ascii_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_ascii_digit(char c) { return c >= '0' && c <= '9'; }

class PatternTranslation {
 public:
  explicit PatternTranslation(std::string_view written) : written_(written) {}

  std::string take() {
    while (at_ < written_.size()) item();
    refuse_unless(groups_.empty(), written_.size(), "a group that has no end");
    return std::move(out_);
  }

 private:
  // What has been read since `begin`, which is why a message can quote it.
  void refuse_unless(bool ok, size_t begin, const char* what) const {
    if (ok) return;
    const size_t end = std::min(std::max(at_, begin + 1), written_.size());
    fail(ExitCode::data, "\"", printable(written_.substr(begin, end - begin)), "\" at byte ", begin, " of the expression \"",
         printable(shortened(std::string(written_))), "\": ", what, ", is not supported");
  }
  bool at_end() const { return at_ == written_.size(); }
  bool next_is(std::string_view text) const { return written_.substr(at_).starts_with(text); }
  bool accept(std::string_view text) {
    if (!next_is(text)) return false;
    at_ += text.size();
    return true;
  }
  bool ignores_case() const { return !groups_.empty() && groups_.back(); }

  void item() {
    const size_t begin = at_;
    if (accept("|") || accept(")")) {
      if (written_[begin] == ')') {
        refuse_unless(!groups_.empty(), begin, "an end without a group");
        groups_.pop_back();
        out_ += ')';
        quantifier();
      } else {
        out_ += '|';
      }
      last_letter_ = '\0';
    } else if (accept("(")) {
      group(begin);
    } else {
      single(begin);
      quantifier();
    }
  }

  void group(size_t begin) {
    static constexpr std::array<std::string_view, 7> kKinds = {"?:", "?i:", "?=", "?!", "?<=", "?<!", "?>"};
    const auto* const kind = std::find_if(kKinds.begin(), kKinds.end(), [&](std::string_view one) { return next_is(one); });
    if (kind != kKinds.end()) {
      at_ += kind->size();
      out_ += text('(', *kind);
    } else {
      if (next_is("?") || next_is("*")) at_ += 2;
      refuse_unless(at_ == begin + 1, begin, "a kind of group");
      out_ += "(?:";  // what it captured nothing asks for
    }
    groups_.push_back(ignores_case() || (kind != kKinds.end() && *kind == "?i:"));
    last_letter_ = '\0';
  }

  void single(size_t begin) {
    const char c = written_[begin];
    if (c == '[') return set(begin);
    ++at_;
    if (c == '\\') return escape(begin, false);
    refuse_unless(std::string_view("^$]*+?{}").find(c) == std::string_view::npos, begin,
                  "an anchor, or a bracket or a quantifier by itself");
    literal(begin, c);
    out_ += c;
  }

  // Where case is ignored, letters with which Oniguruma and PCRE2 disagree are refused.
  void literal(size_t begin, char c) {
    if (!ignores_case()) return;
    refuse_unless(is_ascii(c), begin, "a character beyond ASCII in (?i:...)");
    const std::string pair = {last_letter_, static_cast<char>(is_ascii_letter(c) ? c | 0x20 : c)};
    refuse_unless(std::find(kFoldedPairs.begin(), kFoldedPairs.end(), pair) == kFoldedPairs.end(), begin,
                  "letters in (?i:...) that one character folds to");
    last_letter_ = pair[1];
  }

  // After a backslash, of a class or by itself.
  void escape(size_t begin, bool in_class) {
    refuse_unless(!at_end(), begin, "a backslash at the end");
    const char c = written_[at_++];
    if (c == 's') {
      out_ += in_class ? std::string(kSpaces) : text('[', kSpaces, ']');
    } else if (c == 'S' && !in_class) {
      out_ += text("[^", kSpaces, ']');
    } else if (c == 'd' || c == 'D') {
      out_ += c == 'd' ? R"(\p{Nd})" : R"(\P{Nd})";
    } else if (c == 'p' || c == 'P') {
      property(begin, c == 'P');
    } else if (c == 'x' || c == 'u') {
      code_point(begin, c);
    } else {
      refuse_unless(
          is_ascii(c) && (std::string_view("rntf").find(c) != std::string_view::npos || (!is_ascii_letter(c) && !is_ascii_digit(c))), begin,
          "this escape");
      out_ += {'\\', c};
    }
    last_letter_ = '\0';
  }

  // \p{Lu}, \P{Lu}, \p{^Lu}
  void property(size_t begin, bool negated) {
    const size_t end = written_.find('}', at_);
    refuse_unless(accept("{") && end != std::string_view::npos, begin, "a property without its name in braces");
    negated ^= accept("^");
    const std::string_view name = written_.substr(at_, end - at_);
    at_ = end + 1;
    refuse_unless(std::find(kCategories.begin(), kCategories.end(), name) != kCategories.end(), begin,
                  "a property that is no general category");
    refuse_unless(!ignores_case(), begin, "a property in (?i:...)");
    out_ += text(negated ? R"(\P{)" : R"(\p{)", name, '}');
  }

  // \x41, \x{1F600}, \u00e9: of two digits no more than ASCII, since Oniguruma takes them for a byte.
  void code_point(size_t begin, char kind) {
    const bool braced = kind == 'x' && accept("{");
    const size_t first = at_, most = braced ? 6 : kind == 'x' ? 2 : 4;
    while (!at_end() && at_ - first < most && std::string_view("0123456789abcdefABCDEF").find(written_[at_]) != std::string_view::npos)
      ++at_;
    const std::string digits(written_.substr(first, at_ - first));
    const bool whole = braced ? accept("}") && !digits.empty() : digits.size() == most;
    refuse_unless(whole, begin, "a code point that is not whole");
    const auto value = std::stoul(digits, nullptr, 16);
    refuse_unless(value <= 0x10FFFF && (value < 0xD800 || value > 0xDFFF) && (braced || kind == 'u' || value < 0x80), begin,
                  "this code point");
    refuse_unless(!ignores_case(), begin, "a code point in (?i:...)");
    out_ += text(R"(\x{)", digits, '}');
  }

  // [...], without others inside.
  void set(size_t begin) {
    ++at_;
    out_ += '[';
    if (accept("^")) out_ += '^';
    refuse_unless(!next_is("]"), begin, "a class that begins with its end");
    while (!accept("]")) {
      refuse_unless(!at_end(), begin, "a class that has no end");
      const size_t element = at_;
      const char c = written_[at_++];
      if (c == '\\') {
        escape(element, true);
        continue;
      }
      refuse_unless(c != '[' && !(c == '&' && next_is("&")), element, "a class in a class, or an intersection");
      if (c == '-') hyphen(begin, element);
      literal(element, c);
      last_letter_ = '\0';
      out_ += c;
    }
    out_ += ']';
    last_letter_ = '\0';
  }

  // One that is no range stands at an end: "[+-]", "[-+]". Neither end of a range is a property or \s.
  void hyphen(size_t begin, size_t at) {
    const bool is_first = at == begin + 1 || (at == begin + 2 && written_[begin + 1] == '^');
    if (is_first || next_is("]")) return;
    const auto is_set = [&](size_t escape) {
      return escape < written_.size() && written_[escape] == '\\' && escape + 1 < written_.size() &&
             std::string_view("sdDpP").find(written_[escape + 1]) != std::string_view::npos;
    };
    refuse_unless(!is_set(at_) && !(at >= 2 && is_set(at - 2)) && written_[at - 1] != '}' && !next_is("["), at, "this range");
  }

  void quantifier() {
    const size_t begin = at_;
    if (accept("{")) {
      counts(begin);
      refuse_unless(!next_is("?") && !next_is("+"), begin, "a quantifier of a quantifier");
    } else if (accept("*") || accept("+") || accept("?")) {
      if (next_is("?") || next_is("+")) ++at_;
    } else {
      return;
    }
    out_ += written_.substr(begin, at_ - begin);
    last_letter_ = '\0';
    refuse_unless(at_end() || std::string_view("*+?{").find(written_[at_]) == std::string_view::npos, begin,
                  "a quantifier of a quantifier");
  }

  // {n}, {n,} or {n,m}
  void counts(size_t begin) {
    const size_t first = at_;
    while (!at_end() && is_ascii_digit(written_[at_])) ++at_;
    const bool has_least = at_ > first;
    if (accept(",")) {
      while (!at_end() && is_ascii_digit(written_[at_])) ++at_;
    }
    refuse_unless(has_least && at_ - first <= 9 && accept("}"), begin, "this brace");
  }

  std::string_view written_;
  size_t at_ = 0;
  std::string out_;
  std::vector<bool> groups_;  // that are open; whether they ignore case
  char last_letter_ = '\0';   // in (?i:...), lower case; '\0': none just before
};

}  // namespace

std::string pcre2_expression(std::string_view written) { return PatternTranslation(written).take(); }

std::string pcre2_literal(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (is_ascii(c) && !is_ascii_letter(c) && !is_ascii_digit(c)) out += '\\';
    out += c;
  }
  return out;
}

}  // namespace mantissa
