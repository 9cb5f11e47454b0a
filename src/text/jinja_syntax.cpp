#include "text/jinja_syntax.h"

#include <array>
#include <charconv>
#include <span>

#include "text/characters.h"

namespace mantissa {
namespace {

// Texts are without what the tags beside them take along.
struct Token {
  enum class Kind { text, word, number, string, sign, block, block_end, output, output_end, end };
  Kind kind = Kind::end;
  std::string text = {};
  int line = 0;
};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Cuts a template into texts and the words of its tags.
class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] != '\r')
        source_ += source[i];
      else if (i + 1 == source.size() || source[i + 1] != '\n')
        source_ += '\n';
    }
    if (source_.ends_with('\n')) source_.pop_back();
  }

  std::vector<Token> tokens() {
    return at_line(line_, [&] {
      require(source_.size() <= kMostBytes, ExitCode::data, "the template has more than ", kMostBytes, " bytes");
      require(is_utf8(source_), ExitCode::data, "the template is not UTF-8");
      while (place_ < source_.size()) {
        const size_t mark = std::min(next_mark(), source_.size());
        add_text(source_.substr(place_, mark - place_), std::string_view(source_).substr(mark, 3));
        move_to(mark);
        if (place_ < source_.size()) source_[place_ + 1] == '#' ? comment() : tag();
      }
      add(Token::Kind::end);
      return std::move(tokens_);
    });
  }

 private:
  static constexpr size_t kMostBytes = size_t{256} << 10;

  void add(Token::Kind kind, std::string text = {}) { tokens_.push_back({.kind = kind, .text = std::move(text), .line = line_}); }

  size_t next_mark() const {
    for (size_t place = source_.find('{', place_); place != std::string::npos && place + 1 < source_.size();
         place = source_.find('{', place + 1))
      if (source_[place + 1] == '{' || source_[place + 1] == '%' || source_[place + 1] == '#') return place;
    return std::string::npos;
  }

  void move_to(size_t to) {
    for (; place_ < to; ++place_) line_ += source_[place_] == '\n';
  }

  // Adds a text. mark: the mark that follows, "{%-"; "": the end.
  void add_text(std::string text, std::string_view mark) {
    const bool starts_line = place_ == 0 || source_[place_ - 1] == '\n';
    const size_t without_blanks = stripped(text, is_python_space, false).size(), last_line = text.rfind('\n') + 1;
    if (mark.size() == 3 && mark[2] == '-')
      text.resize(without_blanks);
    else if (mark.size() >= 2 && mark[1] != '{' && !mark.ends_with('+') && without_blanks <= last_line && (last_line > 0 || starts_line))
      text.resize(last_line);
    if (!text.empty()) add(Token::Kind::text, std::move(text));
  }

  // Moves behind the end of a tag or comment, which is at `end`, and over what it takes along.
  void leave(size_t end, bool strips, bool trims) {
    size_t to = end + 2;
    if (strips)
      to += python_spaces_before(std::string_view(source_).substr(to));
    else if (trims && to < source_.size() && source_[to] == '\n')
      ++to;
    move_to(to);
  }

  void comment() {
    const size_t end = source_.find("#}", place_ + 2);
    require(end != std::string::npos, ExitCode::data, "a comment is not closed");
    const char before = end > place_ + 2 ? source_[end - 1] : ' ';
    leave(end, before == '-', before != '+');
  }

  void tag() {
    const bool block = source_[place_ + 1] == '%';
    add(block ? Token::Kind::block : Token::Kind::output);
    move_to(place_ + 2);
    if (place_ < source_.size() && (source_[place_] == '-' || source_[place_] == '+')) move_to(place_ + 1);
    std::string open;  // brackets
    for (;;) {
      move_to(place_ + python_spaces_before(std::string_view(source_).substr(place_)));
      require(place_ < source_.size(), ExitCode::data, "a tag is not closed");
      if (open.empty() && end_of_tag(block)) return;
      token(open);
    }
  }

  bool end_of_tag(bool block) {
    const std::string_view rest = std::string_view(source_).substr(place_), end = block ? "%}" : "}}";
    const size_t sign = rest.front() == '-' || (block && rest.front() == '+') ? 1 : 0;
    if (rest.substr(sign, 2) != end) return false;
    add(block ? Token::Kind::block_end : Token::Kind::output_end);
    leave(place_ + sign, rest.front() == '-', block && rest.front() != '+');
    return true;
  }

  void token(std::string& open) {
    const char first = source_[place_];
    size_t end = place_;
    if (is_letter(first)) {
      while (end < source_.size() && (is_letter(source_[end]) || is_digit(source_[end]))) ++end;
      add(Token::Kind::word, source_.substr(place_, end - place_));
      move_to(end);
    } else if (is_digit(first)) {
      while (end < source_.size() && is_digit(source_[end])) ++end;
      if (end + 1 < source_.size() && source_[end] == '.' && is_digit(source_[end + 1]))
        for (++end; end < source_.size() && is_digit(source_[end]);) ++end;
      add(Token::Kind::number, source_.substr(place_, end - place_));
      move_to(end);
    } else {
      first == '"' || first == '\'' ? string(first) : sign(open);
    }
  }

  void string(char quote) {
    std::string text;
    size_t place = place_ + 1;
    for (; place < source_.size() && source_[place] != quote; ++place)
      text += source_[place] == '\\' && place + 1 < source_.size() ? escaped(source_[++place]) : std::string(1, source_[place]);
    require(place < source_.size(), ExitCode::data, "a string is not closed");
    add(Token::Kind::string, std::move(text));
    move_to(place + 1);
  }

  // Returns what the escape of a letter stands for.
  static std::string escaped(char letter) {
    constexpr std::string_view kLetters = "ntr\\'\"\n", kRefused = "abfvxuUN01234567";
    constexpr std::array kMeanings = {"\n", "\t", "\r", "\\", "'", "\"", ""};
    require(kRefused.find(letter) == std::string_view::npos, ExitCode::data, "the escape \\", std::string(1, letter), " is not supported");
    const size_t known = kLetters.find(letter);
    return known != std::string_view::npos ? kMeanings[known] : std::string("\\") + letter;
  }

  void sign(std::string& open) {
    constexpr std::array<std::string_view, 6> kLong = {"**", "//", "==", "!=", "<=", ">="};
    constexpr std::string_view kShort = "+-*/%~<>=()[]{},:.|", kOpen = "([{", kClose = ")]}";
    const std::string_view rest = std::string_view(source_).substr(place_);
    const auto found = std::ranges::find_if(kLong, [&](std::string_view known) { return rest.starts_with(known); });
    const std::string_view text = found != kLong.end() ? *found : rest.substr(0, 1);
    if (found == kLong.end() && kShort.find(text) == std::string_view::npos)
      fail(ExitCode::data, '"', shortened(rest.substr(0, rest.find_first_of(" \n"))), "\" is not expected");
    if (kOpen.find(text) != std::string_view::npos) open += text;
    if (const size_t closed = kClose.find(text); closed != std::string_view::npos) {
      require(!open.empty() && open.back() == kOpen[closed], ExitCode::data, '"', text, "\" closes nothing");
      open.pop_back();
    }
    add(Token::Kind::sign, std::string(text));
    move_to(place_ + text.size());
  }

  std::string source_;
  size_t place_ = 0;
  int line_ = 1;
  std::vector<Token> tokens_;
};

using Kind = JinjaKind;
using Words = std::span<const std::string_view>;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  JinjaNode whole() {
    return at_line(line_, [&] { return sequence_until({}); });
  }

 private:
  const Token& now() const { return tokens_[place_]; }
  Token take() {
    Token token = std::move(tokens_[place_++]);
    line_ = now().line;
    return token;
  }
  bool is(std::string_view text) const {
    return (now().kind == Token::Kind::sign || now().kind == Token::Kind::word) && now().text == text;
  }
  bool is_among(Words words) const {
    return std::ranges::any_of(words, [&](std::string_view one) { return is(one); });
  }
  bool take_if(std::string_view text) { return is(text) && (take(), true); }
  void expect(bool found, std::string_view what) const {
    require(found, ExitCode::data, "expected ", what, now().text.empty() ? "" : ", got \"" + shortened(now().text) + "\"");
  }
  void expect(std::string_view text) { expect(take_if(text), text); }
  void expect_end() {
    expect(now().kind == Token::Kind::block_end, "the end of the block");
    take();
  }
  Token word(std::string_view what) {
    expect(now().kind == Token::Kind::word, what);
    return take();
  }

  template <class... Parts>
  static JinjaNode node(JinjaKind kind, Token token, Parts... parts) {
    JinjaNode out(kind, token.line, std::move(token.text));
    (out.add(std::move(parts)), ...);
    return out;
  }
  // Makes a node that has no token of its own.
  template <class... Parts>
  JinjaNode node(JinjaKind kind, Parts... parts) const {
    return node(kind, Token{.line = now().line}, std::move(parts)...);
  }

  // Statements up to a block that begins with one of these words, behind which it stops.
  JinjaNode sequence_until(std::initializer_list<std::string_view> ends, std::string* found = nullptr) {
    const JinjaLevel level(depth_);
    JinjaNode out = node(Kind::sequence);
    while (now().kind != Token::Kind::end) {
      Token token = take();
      if (token.kind == Token::Kind::text) {
        out.add(node(Kind::text, std::move(token)));
      } else if (token.kind == Token::Kind::output) {
        out.add(node(Kind::output, std::move(token), expression()));
        expect(now().kind == Token::Kind::output_end, "}}");
        take();
      } else if (is_among({ends.begin(), ends.end()})) {
        std::string end = take().text;
        if (found != nullptr) *found = std::move(end);
        return out;
      } else {
        out.add(statement());
      }
    }
    if (ends.size() > 0) expect(false, *(ends.end() - 1));
    return out;
  }
  JinjaNode block_until(std::string_view end) {
    JinjaNode body = sequence_until({end});
    expect_end();
    return body;
  }

  JinjaNode statement() {
    const int line = now().line;
    if (is("break") || is("continue")) {
      require(in_loop_, ExitCode::data, now().text, " is not inside a loop");
      JinjaNode out = node(is("break") ? Kind::leave : Kind::next);
      take();
      expect_end();
      return out;
    }
    JinjaNode out = take_if("if")      ? branch_statement()
                    : take_if("for")   ? loop_statement()
                    : take_if("set")   ? assignment()
                    : take_if("macro") ? macro_statement()
                                       : generation();
    out.line = line;
    return out;
  }

  // The block marks what the model writes.
  JinjaNode generation() {
    require(take_if("generation"), ExitCode::data, "the statement ", shortened(now().text), " is not supported");
    expect_end();
    return block_until("endgeneration");
  }

  JinjaNode branch_statement() {
    JinjaNode out = node(Kind::branch);
    for (std::string found = "elif"; found == "elif";) {
      out.add(expression());
      expect_end();
      out.add(sequence_until({"elif", "else", "endif"}, &found));
      if (found != "elif") expect_end();
      if (found == "else") out.add(block_until("endif"));
    }
    return out;
  }

  JinjaNode loop_statement() {
    JinjaNode out = node(Kind::loop);
    const bool bracket = take_if("(");
    out.names = {word("a name").text};
    while (take_if(",")) out.names.push_back(word("a name").text);
    if (bracket) expect(")");
    expect("in");
    out.add(chain(0));
    out.add(take_if("if") ? expression() : node(Kind::absent));
    expect_end();
    std::string found;
    const bool before = std::exchange(in_loop_, true);
    out.add(sequence_until({"else", "endfor"}, &found));
    in_loop_ = before;
    expect_end();
    out.add(found == "else" ? block_until("endfor") : node(Kind::absent));
    return out;
  }

  JinjaNode assignment() {
    const std::string target = word("a name").text, attribute = take_if(".") ? word("a name").text : "";
    const bool captures = !take_if("=");
    if (captures) expect_end();
    JinjaNode out = node(captures ? Kind::capture : Kind::assign, captures ? outside_loops("endset") : expression());
    expect_end();
    out.name = attribute;
    out.names = {target};
    return out;
  }

  JinjaNode macro_statement() {
    JinjaNode out = node(Kind::macro, word("a name"));
    std::vector<JinjaNode> defaults;
    expect("(");
    while (!take_if(")")) {
      out.names.push_back(word("a name").text);
      expect(defaults.empty() || is("="), "=");
      if (take_if("=")) defaults.push_back(expression());
      if (!is(")")) expect(",");
    }
    expect_end();
    out.add(outside_loops("endmacro"));
    if (now().kind == Token::Kind::word) take();  // its name again
    expect_end();
    for (JinjaNode& one : defaults) out.add(std::move(one));
    return out;
  }

  JinjaNode outside_loops(std::string_view end) {
    const bool before = std::exchange(in_loop_, false);
    JinjaNode body = sequence_until({end});
    in_loop_ = before;
    return body;
  }

  JinjaNode expression() {
    const JinjaLevel level(depth_);
    JinjaNode value = chain(0);
    while (is("if")) {
      Token token = take();
      JinjaNode condition = chain(0);
      JinjaNode otherwise = take_if("else") ? expression() : node(Kind::absent);
      value = node(Kind::choice, std::move(token), std::move(condition), std::move(value), std::move(otherwise));
    }
    return value;
  }

  // Parses operators of a level, which bind from left to right, and what binds closer.
  JinjaNode chain(size_t level) {
    static constexpr std::array<std::string_view, 1> kOr = {"or"}, kAnd = {"and"}, kJoin = {"~"};
    static constexpr std::array<std::string_view, 2> kSum = {"+", "-"};
    static constexpr std::array<std::string_view, 5> kProduct = {"*", "/", "//", "%", "**"};
    static constexpr std::array<Words, 5> kLevels = {kOr, kAnd, kSum, kJoin, kProduct};
    if (level == kLevels.size()) return with_filters(signed_value());
    const auto operand = [&] { return level == 1 ? negation() : chain(level + 1); };
    JinjaNode value = operand();
    while (is_among(kLevels[level])) {
      Token token = take();
      value = node(level < 2 ? Kind::logic : Kind::binary, std::move(token), std::move(value), operand());
    }
    return value;
  }

  JinjaNode negation() {
    const JinjaLevel level(depth_);
    if (!is("not")) return comparison();
    Token token = take();
    return node(Kind::unary, std::move(token), negation());
  }

  JinjaNode comparison() {
    static constexpr std::array<std::string_view, 7> kNames = {"==", "!=", "<=", ">=", "<", ">", "in"};
    JinjaNode out = node(Kind::comparison, chain(2));
    for (;;) {
      const bool turned = is("not") && tokens_[place_ + 1].text == "in";
      if (turned) take();
      if (!is_among(kNames)) return out.names.empty() ? std::move(out.parts[0]) : std::move(out);
      out.names.push_back((turned ? "not " : "") + take().text);
      out.add(chain(2));
    }
  }

  JinjaNode signed_value() {
    const JinjaLevel level(depth_);
    if (!is("-") && !is("+")) return with_members(primary());
    Token token = take();
    return node(Kind::unary, std::move(token), signed_value());
  }

  JinjaNode with_filters(JinjaNode value) {
    for (;;) {
      if (take_if("|")) {
        value = node(Kind::filter, word("a filter"), std::move(value));
        add_arguments(value);
      } else if (is("is")) {
        Token token = take();
        const bool turned = take_if("not");
        value = tested(std::move(value));
        token.text = "not";
        if (turned) value = node(Kind::unary, std::move(token), std::move(value));
      } else {
        return value;
      }
    }
  }

  JinjaNode tested(JinjaNode value) {
    static constexpr std::array<std::string_view, 7> kBehind = {"else", "or", "and", "if", "in", "not", "is"};
    JinjaNode out = node(Kind::test, word("a test"), std::move(value));
    const bool value_follows = now().kind == Token::Kind::string || now().kind == Token::Kind::number || is("[") || is("{") ||
                               (now().kind == Token::Kind::word && !is_among(kBehind));
    if (value_follows)
      out.add(with_members(primary()));
    else
      add_arguments(out);
    expect(out.parts.size() <= 2 && out.names.empty(), "one argument of a test");
    return out;
  }

  // Adds the arguments in brackets, if there are some.
  void add_arguments(JinjaNode& call) {
    if (!take_if("(")) return;
    while (!take_if(")")) {
      const bool named =
          now().kind == Token::Kind::word && tokens_[place_ + 1].kind == Token::Kind::sign && tokens_[place_ + 1].text == "=";
      expect(named || call.names.empty(), "a named argument");
      if (named) {
        expect(std::ranges::find(call.names, now().text) == call.names.end(), "an argument with a new name");
        call.names.push_back(take().text);
        take();
      }
      call.add(expression());
      if (!is(")")) expect(",");
    }
  }

  JinjaNode with_members(JinjaNode value) {
    for (;;) {
      if (take_if(".")) {
        value = node(Kind::attribute, word("a name"), std::move(value));
      } else if (take_if("[")) {
        value = subscript(std::move(value));
      } else if (is("(")) {
        value = node(Kind::call, std::move(value));
        add_arguments(value);
      } else {
        return value;
      }
    }
  }

  JinjaNode subscript(JinjaNode object) {
    JinjaNode out = node(Kind::item, std::move(object));
    for (bool more = true; more; more = take_if(":")) {
      if (out.parts.size() > 1) out.kind = Kind::slice;
      out.add(is(":") || is("]") ? node(Kind::absent) : expression());
    }
    expect("]");
    expect(out.parts.size() <= 4 && (out.kind == Kind::slice || out.part(1).kind != Kind::absent), "an index");
    while (out.kind == Kind::slice && out.parts.size() < 4) out.add(node(Kind::absent));
    return out;
  }

  JinjaNode primary() {
    if (now().kind == Token::Kind::word) return named_value();
    if (now().kind == Token::Kind::number) return number();
    if (now().kind == Token::Kind::string) {
      Token token = take();
      while (now().kind == Token::Kind::string) token.text += take().text;
      return literal(token.line, {std::make_shared<const std::string>(std::move(token.text))});
    }
    if (is("{")) return dictionary();
    const std::string_view close = is("(") ? ")" : "]";
    expect(is("(") || is("["), "a value");
    take();
    if (take_if(close)) return node(Kind::list);
    JinjaNode value = expression();
    if (close == ")" && !is(",")) {
      expect(close);
      return value;
    }
    JinjaNode out = node(Kind::list, std::move(value));
    while (take_if(","))
      if (!is(close)) out.add(expression());
    expect(close);
    return out;
  }

  JinjaNode dictionary() {
    JinjaNode out = node(Kind::dict, take());
    while (!take_if("}")) {
      out.add(expression());
      expect(":");
      out.add(expression());
      if (!is("}")) expect(",");
    }
    return out;
  }

  static JinjaNode literal(int line, JinjaValue value) {
    JinjaNode out(Kind::literal, line, "");
    out.value = std::move(value);
    return out;
  }

  JinjaNode named_value() {
    Token token = take();
    const bool truth = token.text == "true" || token.text == "True";
    if (token.text == "none" || token.text == "None") return literal(token.line, {std::monostate()});
    if (truth || token.text == "false" || token.text == "False") return literal(token.line, {truth});
    return node(Kind::variable, std::move(token));
  }

  JinjaNode number() {
    const std::string& text = now().text;
    const char* const end = text.data() + text.size();
    int64_t whole = 0;
    double fraction = 0;
    const bool is_whole = text.find('.') == std::string::npos;
    const auto read = is_whole ? std::from_chars(text.data(), end, whole) : std::from_chars(text.data(), end, fraction);
    require(read.ec == std::errc() && read.ptr == end, ExitCode::data, shortened(text), " is not a number");
    const int line = take().line;
    return is_whole ? literal(line, {whole}) : literal(line, {fraction});
  }

  std::vector<Token> tokens_;
  size_t place_ = 0;
  int line_ = 1, depth_ = 0;
  bool in_loop_ = false;
};

}  // namespace

JinjaNode parse_jinja(std::string_view source) { return Parser(Lexer(source).tokens()).whole(); }

}  // namespace mantissa
