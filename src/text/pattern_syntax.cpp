#include "text/pattern_syntax.h"

#include <algorithm>
#include <array>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/base/text.h"

namespace mantissa {
namespace {

// Pairs that single characters (U+00DF, the ligatures from U+FB00) fold to: Oniguruma lets them match these letters where case is ignored.
constexpr std::array<std::string_view, 5> kFoldedPairs = {"ss", "ff", "fi", "fl", "st"};

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
bool is_ascii_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
bool is_ascii_digit(char c) { return c >= '0' && c <= '9'; }

// Adds, where case is ignored, the other case of each ASCII letter and all that folds to it.
CodePoints of_any_case(const CodePoints& points) {
  constexpr char32_t kLongS = 0x17F, kKelvin = 0x212A;
  CodePoints out = points;
  for (char32_t letter = 'a'; letter <= 'z'; ++letter) {
    const char32_t capital = letter - 0x20;
    if (!is_among(points, letter) && !is_among(points, capital)) continue;
    out.insert(out.end(), {{letter, letter}, {capital, capital}});
    if (letter == 's') out.push_back({kLongS, kLongS});
    if (letter == 'k') out.push_back({kKelvin, kKelvin});
  }
  return united(std::move(out));
}

class PatternTranslation {
 public:
  explicit PatternTranslation(std::string_view written) : written_(written) {}

  PatternParts take() {
    while (at_ < written_.size()) item();
    refuse_unless(groups_.empty(), written_.size(), "a group that is not closed");
    return std::move(out_);
  }

 private:
  // Refuses the construct read since `begin`, which a message can quote for that reason.
  void refuse_unless(bool ok, size_t begin, const char* what) const {
    if (ok) return;
    const size_t end = std::min(std::max(at_, begin + 1), written_.size());
    fail(ExitCode::data, "\"", printable(written_.substr(begin, end - begin)), "\" at byte ", begin, " of the expression \"",
         printable(shortened(std::string(written_))), "\" is not supported: ", what);
  }
  bool at_end() const { return at_ == written_.size(); }
  bool next_is(std::string_view text) const { return written_.substr(at_).starts_with(text); }
  bool accept(std::string_view text) {
    if (!next_is(text)) return false;
    at_ += text.size();
    return true;
  }
  bool ignores_case() const { return !groups_.empty() && groups_.back(); }
  void put(std::string_view syntax) { out_.add(syntax); }
  void put(CodePoints characters) { out_.add(std::move(characters)); }
  CodePoints cased(CodePoints points) const { return ignores_case() ? of_any_case(points) : points; }

  void item() {
    const size_t begin = at_;
    if (accept("|") || accept(")")) {
      if (written_[begin] == ')') {
        refuse_unless(!groups_.empty(), begin, "a ) without a group");
        groups_.pop_back();
        put(")");
        quantifier();
      } else {
        put("|");
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
    const bool ignores = kind != kKinds.end() && *kind == "?i:";
    if (kind != kKinds.end()) {
      at_ += kind->size();
      put(ignores ? "(?:" : text('(', *kind));
    } else {
      if (next_is("?") || next_is("*")) at_ += 2;
      refuse_unless(at_ == begin + 1, begin, "an unknown kind of group");
      put("(?:");  // nothing asks for its capture
    }
    groups_.push_back(ignores_case() || ignores);
    last_letter_ = '\0';
  }

  void single(size_t begin) {
    if (written_[begin] == '[') return put(set(begin));
    const char32_t c = next_character(written_, at_);
    if (c == '\\') return put(escape(begin));
    refuse_unless(c >= 0x80 || std::string_view("^$]*+?{}").find(written_[begin]) == std::string_view::npos, begin,
                  "an anchor, or a bracket or a quantifier by itself");
    literal(begin, c);
    put(c == '.' ? others({{'\n', '\n'}}) : cased({{c, c}}));
  }

  // Where case is ignored, letters that other characters fold to in pairs are refused.
  void literal(size_t begin, char32_t c) {
    if (!ignores_case()) return;
    refuse_unless(c < 0x80, begin, "a character beyond ASCII in (?i:...)");
    const char letter = static_cast<char>(c);
    const std::string pair = {last_letter_, static_cast<char>(is_ascii_letter(letter) ? letter | 0x20 : letter)};
    refuse_unless(std::find(kFoldedPairs.begin(), kFoldedPairs.end(), pair) == kFoldedPairs.end(), begin,
                  "letters in (?i:...) that one character folds to");
    last_letter_ = pair[1];
  }

  // Reads what follows a backslash, of a class or by itself.
  CodePoints escape(size_t begin) {
    refuse_unless(!at_end(), begin, "a backslash at the end");
    last_letter_ = '\0';
    const char c = written_[at_++];
    switch (c) {
      case 's': return white_space();
      case 'S': return others(white_space());
      case 'd': return *code_points_of("Nd");
      case 'D': return others(*code_points_of("Nd"));
      case 'w': return word_characters();
      case 'W': return others(word_characters());
      case 'p': return property(begin, false);
      case 'P': return property(begin, true);
      case 'x':
      case 'u': return code_point(begin, c);
      case 'r': return {{'\r', '\r'}};
      case 'n': return {{'\n', '\n'}};
      case 't': return {{'\t', '\t'}};
      case 'f': return {{'\f', '\f'}};
      default: break;
    }
    refuse_unless(is_ascii(c) && !is_ascii_letter(c) && !is_ascii_digit(c), begin, "an unknown escape");
    const auto point = static_cast<char32_t>(c);
    return {{point, point}};
  }

  // Reads \p{Lu}, \P{Lu}, \p{^Lu}.
  CodePoints property(size_t begin, bool negated) {
    const size_t end = written_.find('}', at_);
    refuse_unless(accept("{") && end != std::string_view::npos, begin, "a property without its name in braces");
    negated ^= accept("^");
    const std::optional<CodePoints> points = code_points_of(written_.substr(at_, end - at_));
    at_ = end + 1;
    refuse_unless(points.has_value(), begin, "a property that is not a general category");
    refuse_unless(!ignores_case(), begin, "a property in (?i:...)");
    return negated ? others(*points) : *points;
  }

  // Reads \x41, \x{1F600}, \u00e9: of two digits no more than ASCII, since Oniguruma takes them for a byte.
  CodePoints code_point(size_t begin, char kind) {
    const bool braced = kind == 'x' && accept("{");
    const size_t first = at_, most = braced ? 6 : kind == 'x' ? 2 : 4;
    while (!at_end() && at_ - first < most && std::string_view("0123456789abcdefABCDEF").find(written_[at_]) != std::string_view::npos)
      ++at_;
    const std::string digits(written_.substr(first, at_ - first));
    const bool whole = braced ? accept("}") && !digits.empty() : digits.size() == most;
    refuse_unless(whole, begin, "a code point that is incomplete");
    const auto value = static_cast<char32_t>(std::stoul(digits, nullptr, 16));
    refuse_unless(value < kCodePoints && (value < 0xD800 || value > 0xDFFF) && (braced || kind == 'u' || value < 0x80), begin,
                  "a code point that is out of range");
    refuse_unless(!ignores_case(), begin, "a code point in (?i:...)");
    return {{value, value}};
  }

  // Reads [...], without others inside.
  CodePoints set(size_t begin) {
    ++at_;
    const bool negated = accept("^");
    refuse_unless(!next_is("]"), begin, "a class that begins with ]");
    CodePoints out;
    while (!accept("]")) {
      const size_t element = at_;
      CodePoints points = member(begin);
      if (next_is("-") && !next_is("-]")) {
        const size_t hyphen = at_++;
        const CodePoints last = is_one(points) ? member(begin) : CodePoints();
        refuse_unless(is_one(last) && points[0].first <= last[0].first, is_one(points) ? element : hyphen,
                      "a range that is not from one character up to another");
        points[0].last = last[0].first;
      }
      out.insert(out.end(), points.begin(), points.end());
    }
    last_letter_ = '\0';
    out = cased(united(std::move(out)));
    return negated ? others(out) : out;
  }

  static bool is_one(const CodePoints& points) { return points.size() == 1 && points[0].first == points[0].last; }

  // Reads a character or an escape of a class, or the end of a range.
  CodePoints member(size_t set) {
    refuse_unless(!at_end(), set, "a class that is not closed");
    const size_t begin = at_;
    const char32_t c = next_character(written_, at_);
    if (c == '\\') return escape(begin);
    refuse_unless(c != '[' && !(c == '&' && next_is("&")), begin, "a class in a class, or an intersection");
    literal(begin, c);
    last_letter_ = '\0';
    return {{c, c}};
  }

  void quantifier() {
    const size_t begin = at_;
    if (accept("{")) {
      const auto digits = [this] {
        while (!at_end() && is_ascii_digit(written_[at_])) ++at_;
      };
      const size_t first = at_;  // {n}, {n,} or {n,m}
      digits();
      const bool has_least = at_ > first;
      if (accept(",")) digits();
      refuse_unless(has_least && at_ - first <= 9 && accept("}"), begin, "a brace that is not {n}, {n,} or {n,m}");
      refuse_unless(!next_is("?") && !next_is("+"), begin, "a quantifier of a quantifier");
    } else if (accept("*") || accept("+") || accept("?")) {
      if (next_is("?") || next_is("+")) ++at_;
    } else {
      return;
    }
    put(written_.substr(begin, at_ - begin));
    last_letter_ = '\0';
    refuse_unless(at_end() || std::string_view("*+?{").find(written_[at_]) == std::string_view::npos, begin,
                  "a quantifier of a quantifier");
  }

  std::string_view written_;
  size_t at_ = 0;
  PatternParts out_;
  std::vector<bool> groups_;  // that are open; whether they ignore case
  char last_letter_ = '\0';   // in (?i:...), lower case; '\0': none just before
};

}  // namespace

void PatternParts::add(CodePoints characters) {
  const auto [found, is_new] = indices_.try_emplace(std::move(characters), static_cast<int32_t>(sets_.size()));
  if (is_new) sets_.push_back(found->first);
  parts_.push_back({.syntax = {}, .set = found->second});
}

PatternParts pattern_parts(std::string_view expression) { return PatternTranslation(expression).take(); }

PatternParts literal_parts(std::string_view text) {
  PatternParts out;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    out.add(CodePoints{{c, c}});
  }
  return out;
}

}  // namespace mantissa
