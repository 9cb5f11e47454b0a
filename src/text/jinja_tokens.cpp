#include "text/jinja_tokens.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "mantissa/base/utf8.h"
#include "text/jinja_syntax.h"

namespace mantissa {
namespace {

constexpr size_t kMostBytes = size_t{1} << 20;
constexpr std::string_view kBlank = " \t\r\n\v\f";

using Token = JinjaToken;
using Tokens = JinjaTokens;

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    require(source.size() <= kMostBytes, ExitCode::data, "the template has more than ", kMostBytes, " bytes");
    for (size_t i = 0; i < source.size(); ++i)
      if (source[i] != '\r' || i + 1 == source.size() || source[i + 1] != '\n') source_ += source[i];
    if (source_.ends_with('\n')) source_.pop_back();
  }

  Tokens tokens() {
    while (at_ < source_.size()) {
      const size_t mark = next_mark();
      const bool whole = mark == std::string::npos;
      add_text(source_.substr(at_, whole ? std::string::npos : mark - at_), whole ? std::string_view() : source_view().substr(mark, 3));
      move_to(whole ? source_.size() : mark);
      if (!whole) source_[at_ + 1] == '#' ? comment() : tag();
    }
    tokens_.push_back({.kind = Token::Kind::end, .line = line_});
    return std::move(tokens_);
  }

 private:
  std::string_view source_view() const { return source_; }

  size_t next_mark() const {
    for (size_t at = source_.find('{', at_); at != std::string::npos && at + 1 < source_.size(); at = source_.find('{', at + 1))
      if (source_[at + 1] == '{' || source_[at + 1] == '%' || source_[at + 1] == '#') return at;
    return std::string::npos;
  }

  void move_to(size_t to) {
    line_ += static_cast<int>(
        std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_), source_.begin() + static_cast<std::ptrdiff_t>(to), '\n'));
    at_ = to;
  }

  // Adds a text. mark: the mark that follows, "{%-"; "": the end.
  void add_text(std::string text, std::string_view mark) {
    const bool starts_line = at_ == 0 || source_[at_ - 1] == '\n';
    if (mark.size() == 3 && mark[2] == '-') {
      text.resize(text.find_last_not_of(kBlank) + 1);
    } else if (!mark.empty() && mark[1] != '{' && !(mark.size() == 3 && mark[2] == '+')) {
      const size_t begin = text.rfind('\n') + 1;  // begin of the last line
      const bool blank = text.find_first_not_of(kBlank, begin) == std::string::npos;
      if (blank && (begin > 0 || starts_line)) text.resize(begin);
    }
    if (!text.empty()) tokens_.push_back({.kind = Token::Kind::text, .text = std::move(text), .line = line_});
  }

  // Moves behind the end of a tag or comment, which is at `end`, and over what it takes along.
  void leave(size_t end, bool strips, bool trims) {
    size_t to = end + 2;
    if (strips)
      to = std::min(source_.find_first_not_of(kBlank, to), source_.size());
    else if (trims && to < source_.size() && source_[to] == '\n')
      ++to;
    move_to(to);
  }

  void comment() {
    const size_t end = source_.find("#}", at_ + 2);
    if (end == std::string::npos) fail_at(line_, "a comment has no end");
    const char before = end > at_ + 2 ? source_[end - 1] : ' ';
    leave(end, before == '-', before != '+');
  }

  void tag() {
    const bool block = source_[at_ + 1] == '%';
    tokens_.push_back({.kind = block ? Token::Kind::block : Token::Kind::output, .line = line_});
    move_to(at_ + 2);
    if (at_ < source_.size() && (source_[at_] == '-' || source_[at_] == '+')) move_to(at_ + 1);
    std::string open;  // brackets
    for (;;) {
      move_to(std::min(source_.find_first_not_of(kBlank, at_), source_.size()));
      if (at_ == source_.size()) fail_at(line_, "a tag has no end");
      if (open.empty() && end_of_tag(block)) return;
      token(open);
    }
  }

  bool end_of_tag(bool block) {
    const std::string_view rest = source_view().substr(at_), end = block ? "%}" : "}}";
    const bool signs = rest.front() == '-' || (block && rest.front() == '+');
    if (rest.substr(signs ? 1 : 0, 2) != end) return false;
    tokens_.push_back({.kind = block ? Token::Kind::block_end : Token::Kind::output_end, .line = line_});
    leave(at_ + (signs ? 1 : 0), rest.front() == '-', block && rest.front() != '+');
    return true;
  }

  void token(std::string& open) {
    const char first = source_[at_];
    if (is_letter(first)) return take(Token::Kind::word, [](char c) { return is_letter(c) || is_digit(c); });
    if (is_digit(first)) return number();
    if (first == '"' || first == '\'') return string(first);
    sign(open);
  }

  template <class Belongs>
  void take(Token::Kind kind, const Belongs& belongs) {
    size_t end = at_;
    while (end < source_.size() && belongs(source_[end])) ++end;
    tokens_.push_back({.kind = kind, .text = source_.substr(at_, end - at_), .line = line_});
    move_to(end);
  }

  void number() {
    bool point = false;
    size_t at = at_;
    take(Token::Kind::number, [&](char c) {
      ++at;
      const bool fraction = c == '.' && !point && at < source_.size() && is_digit(source_[at]);
      point = point || fraction;
      return is_digit(c) || fraction;
    });
  }

  void string(char quote) {
    std::string text;
    size_t at = at_ + 1;
    for (; at < source_.size() && source_[at] != quote; ++at) {
      if (source_[at] == '\\' && at + 1 < source_.size())
        at = escaped(at + 1, text);
      else
        text += source_[at];
    }
    if (at == source_.size()) fail_at(line_, "a string has no end");
    tokens_.push_back({.kind = Token::Kind::string, .text = std::move(text), .line = line_});
    move_to(at + 1);
  }

  // Adds what an escape stands for, whose letter is at `at`; returns its last byte.
  size_t escaped(size_t at, std::string& text) const {
    constexpr std::string_view kLetters = "ntrfvab\\'\"", kMeanings = "\n\t\r\f\v\a\b\\'\"";
    if (const size_t known = kLetters.find(source_[at]); known != std::string_view::npos) {
      text += kMeanings[known];
      return at;
    }
    const size_t digits = source_[at] == 'x' ? 2 : source_[at] == 'u' ? 4 : source_[at] == 'U' ? 8 : 0;
    if (digits == 0 && source_[at] == '\n') return at;
    uint32_t code = 0;
    const char* const begin = source_.data() + at + 1;
    const char* const end = begin + std::min(digits, source_.size() - at - 1);
    const auto read = static_cast<size_t>(std::from_chars(begin, end, code, 16).ptr - begin);
    if (digits > 0 && read == digits && is_unicode_scalar(code)) {
      append_utf8(code, text);
      return at + digits;
    }
    text += '\\';
    text += source_[at];
    return at;
  }

  void sign(std::string& open) {
    constexpr std::array<std::string_view, 6> kLong = {"**", "//", "==", "!=", "<=", ">="};
    constexpr std::string_view kShort = "+-*/%~<>=()[]{},:.|", kOpen = "([{", kClose = ")]}";
    const std::string_view rest = source_view().substr(at_);
    const auto found = std::ranges::find_if(kLong, [&](std::string_view known) { return rest.starts_with(known); });
    if (found == kLong.end() && kShort.find(rest.front()) == std::string_view::npos)
      fail_at(line_, "\"", rest.substr(0, 1), "\" is not expected");
    const std::string_view text = found != kLong.end() ? *found : rest.substr(0, 1);
    if (kOpen.find(text) != std::string_view::npos) open += text;
    if (const size_t closed = kClose.find(text); closed != std::string_view::npos) {
      if (open.empty() || open.back() != kOpen[closed]) fail_at(line_, "\"", text, "\" closes nothing");
      open.pop_back();
    }
    tokens_.push_back({.kind = Token::Kind::sign, .text = std::string(text), .line = line_});
    move_to(at_ + text.size());
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  Tokens tokens_;
};

}  // namespace

JinjaTokens jinja_tokens(std::string_view source) { return Lexer(source).tokens(); }

}  // namespace mantissa
