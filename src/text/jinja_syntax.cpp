#include "text/jinja_syntax.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <utility>

#include "text/jinja_tokens.h"

namespace mantissa {
namespace {

constexpr int kHighest = 250;  // tree: what is evaluated uses the stack

using Token = JinjaToken;
using Tokens = JinjaTokens;

class Parser {
 public:
  explicit Parser(Tokens tokens) : tokens_(std::move(tokens)) {}

  JinjaNode whole() {
    JinjaNode body = sequence_until({});
    if (now().kind != Token::Kind::end) fail_at(now().line, "the template goes on behind its end");
    return body;
  }

 private:
  struct Deeper {  // counts what is nested
    explicit Deeper(Parser& of) : parser(of) {
      if (++parser.depth_ > kHighest) fail_at(parser.now().line, "more than ", kHighest, " levels deep");
    }
    ~Deeper() { --parser.depth_; }
    Deeper(const Deeper&) = delete;
    Deeper& operator=(const Deeper&) = delete;
    Parser& parser;
  };

  const Token& now() const { return tokens_[at_]; }
  Token take() { return tokens_[at_].kind == Token::Kind::end ? tokens_[at_] : tokens_[at_++]; }
  bool is(Token::Kind kind, std::string_view text) const { return now().kind == kind && now().text == text; }
  bool is_sign(std::string_view text) const { return is(Token::Kind::sign, text); }
  bool is_word(std::string_view text) const { return is(Token::Kind::word, text); }
  bool take_sign(std::string_view text) { return is_sign(text) && (++at_, true); }
  bool take_word(std::string_view text) { return is_word(text) && (++at_, true); }
  void expect(bool found, std::string_view what) const {
    if (!found) fail_at(now().line, "expected ", what, now().text.empty() ? "" : ", got \"" + shortened(now().text) + "\"");
  }
  void expect_sign(std::string_view text) { expect(take_sign(text), text); }
  void expect_end() {
    expect(now().kind == Token::Kind::block_end, "the end of the block");
    ++at_;
  }
  std::string word(std::string_view what) {
    expect(now().kind == Token::Kind::word, what);
    return take().text;
  }

  JinjaNode node(JinjaKind kind, std::string name, std::vector<JinjaNode> parts) const {
    JinjaNode out{.kind = kind, .line = now().line, .name = std::move(name), .parts = std::move(parts)};
    for (const JinjaNode& part : out.parts) out.height = std::max(out.height, part.height + 1);
    if (out.height > kHighest) fail_at(out.line, "more than ", kHighest, " levels deep");
    return out;
  }

  // Statements up to a block that begins with one of these words, behind which it stops.
  JinjaNode sequence_until(std::initializer_list<std::string_view> words, std::string* found = nullptr) {
    const Deeper deeper(*this);
    std::vector<JinjaNode> parts;
    for (;;) {
      const Token token = take();
      if (token.kind == Token::Kind::text) {
        parts.push_back(node(JinjaKind::text, token.text, {}));
      } else if (token.kind == Token::Kind::output) {
        parts.push_back(node(JinjaKind::output, "", {expression()}));
        expect(now().kind == Token::Kind::output_end, "}}");
        ++at_;
      } else if (token.kind == Token::Kind::block) {
        const std::string name = word("a statement");
        if (std::ranges::find(words, name) != words.end()) {
          if (found != nullptr) *found = name;
          return node(JinjaKind::sequence, "", std::move(parts));
        }
        parts.push_back(statement(name));
      } else {
        if (words.size() > 0) fail_at(token.line, "expected ", *(words.end() - 1));
        return node(JinjaKind::sequence, "", std::move(parts));
      }
    }
  }

  JinjaNode statement(const std::string& name) {
    if (name == "if") return branch_statement();
    if (name == "for") return loop_statement();
    if (name == "set") return assignment();
    if (name == "macro") return macro_statement();
    if (name == "generation") {  // marks what the model writes
      expect_end();
      JinjaNode body = sequence_until({"endgeneration"});
      expect_end();
      return body;
    }
    if (name != "break" && name != "continue") fail_at(now().line, "the statement ", shortened(name), " is not known here");
    expect_end();
    return node(name == "break" ? JinjaKind::leave : JinjaKind::next, "", {});
  }

  JinjaNode branch_statement() {
    std::vector<JinjaNode> parts;
    for (std::string found = "elif"; found == "elif";) {
      parts.push_back(expression());
      expect_end();
      parts.push_back(sequence_until({"elif", "else", "endif"}, &found));
      if (found == "elif") continue;
      expect_end();
      if (found == "endif") break;
      parts.push_back(sequence_until({"endif"}));
      expect_end();
    }
    return node(JinjaKind::branch, "", std::move(parts));
  }

  JinjaNode loop_statement() {
    std::vector<std::string> targets = target_names();
    expect(take_word("in"), "in");
    JinjaNode list = disjunction(), condition = node(JinjaKind::absent, "", {});
    if (take_word("if")) condition = expression();
    expect_end();
    std::string found;
    JinjaNode body = sequence_until({"else", "endfor"}, &found), otherwise = node(JinjaKind::absent, "", {});
    expect_end();
    if (found == "else") {
      otherwise = sequence_until({"endfor"});
      expect_end();
    }
    JinjaNode out = node(JinjaKind::loop, "", several(std::move(list), std::move(condition), std::move(body), std::move(otherwise)));
    out.names = std::move(targets);
    return out;
  }

  std::vector<std::string> target_names() {
    const bool bracket = take_sign("(");
    std::vector<std::string> names = {word("a name")};
    while (take_sign(",")) names.push_back(word("a name"));
    if (bracket) expect_sign(")");
    return names;
  }

  JinjaNode assignment() {
    std::vector<std::string> targets = target_names();
    std::string attribute_name;
    if (targets.size() == 1 && take_sign(".")) attribute_name = word("a name");
    JinjaNode out;
    if (take_sign("=")) {
      JinjaNode value = expression();
      if (is_sign(",")) value = rest_of_list(std::move(value), "");
      expect_end();
      out = node(JinjaKind::assign, attribute_name, several(std::move(value)));
    } else {
      expect_end();
      out = node(JinjaKind::capture, "", several(sequence_until({"endset"})));
      expect_end();
    }
    out.names = std::move(targets);
    return out;
  }

  JinjaNode macro_statement() {
    const std::string name = word("a name");
    std::vector<std::string> parameters;
    std::vector<JinjaNode> parts(1), defaults;
    expect_sign("(");
    while (!take_sign(")")) {
      parameters.push_back(word("a name"));
      expect(defaults.empty() || is_sign("="), "=");
      if (take_sign("=")) defaults.push_back(expression());
      if (!is_sign(")")) expect_sign(",");
    }
    expect_end();
    parts[0] = sequence_until({"endmacro"});
    if (now().kind == Token::Kind::word) ++at_;  // its name again
    expect_end();
    std::ranges::move(defaults, std::back_inserter(parts));
    JinjaNode out = node(JinjaKind::macro, name, std::move(parts));
    out.names = std::move(parameters);
    return out;
  }

  template <class... Nodes>
  static std::vector<JinjaNode> several(Nodes&&... nodes) {
    std::vector<JinjaNode> out;
    (out.push_back(std::forward<Nodes>(nodes)), ...);
    return out;
  }

  JinjaNode expression() {
    const Deeper deeper(*this);
    JinjaNode value = disjunction();
    while (take_word("if")) {
      JinjaNode condition = disjunction();
      JinjaNode otherwise = take_word("else") ? expression() : node(JinjaKind::absent, "", {});
      value = node(JinjaKind::choice, "", several(std::move(condition), std::move(value), std::move(otherwise)));
    }
    return value;
  }

  JinjaNode disjunction() {
    JinjaNode value = conjunction();
    while (take_word("or")) value = node(JinjaKind::binary, "or", several(std::move(value), conjunction()));
    return value;
  }

  JinjaNode conjunction() {
    JinjaNode value = negation();
    while (take_word("and")) value = node(JinjaKind::binary, "and", several(std::move(value), negation()));
    return value;
  }

  JinjaNode negation() {
    const Deeper deeper(*this);
    return take_word("not") ? node(JinjaKind::unary, "not", several(negation())) : comparison();
  }

  // Several in a row hold together: a < b < c.
  JinjaNode comparison() {
    JinjaNode left = sum(), whole = node(JinjaKind::absent, "", {});
    for (;;) {
      const bool turned = is_word("not") && tokens_[std::min(at_ + 1, tokens_.size() - 1)].text == "in";
      std::string name;
      for (const char* const known : {"==", "!=", "<=", ">=", "<", ">"})
        if (name.empty() && take_sign(known)) name = known;
      if (turned) ++at_;
      if (name.empty() && take_word("in")) name = "in";
      if (name.empty()) break;
      JinjaNode right = sum();
      JinjaNode one = node(JinjaKind::binary, name, several(left, right));
      if (turned) one = node(JinjaKind::unary, "not", several(std::move(one)));
      whole = whole.kind == JinjaKind::absent ? std::move(one) : node(JinjaKind::binary, "and", several(std::move(whole), std::move(one)));
      left = std::move(right);
    }
    return whole.kind == JinjaKind::absent ? std::move(left) : std::move(whole);
  }

  JinjaNode sum() {
    JinjaNode value = joint();
    while (is_sign("+") || is_sign("-")) {
      const std::string name = take().text;
      value = node(JinjaKind::binary, name, several(std::move(value), joint()));
    }
    return value;
  }

  JinjaNode joint() {
    JinjaNode value = product();
    while (take_sign("~")) value = node(JinjaKind::binary, "~", several(std::move(value), product()));
    return value;
  }

  JinjaNode product() {
    JinjaNode value = power();
    while (is_sign("*") || is_sign("/") || is_sign("//") || is_sign("%")) {
      const std::string name = take().text;
      value = node(JinjaKind::binary, name, several(std::move(value), power()));
    }
    return value;
  }

  JinjaNode power() {
    JinjaNode value = signed_value(true);
    while (take_sign("**")) value = node(JinjaKind::binary, "**", several(std::move(value), signed_value(true)));
    return value;
  }

  JinjaNode signed_value(bool filtered) {
    const Deeper deeper(*this);
    JinjaNode value;
    if (is_sign("-") || is_sign("+")) {
      const std::string name = take().text;
      value = node(JinjaKind::unary, name, several(signed_value(false)));
    } else {
      value = with_members(primary());
    }
    return filtered ? with_filters(std::move(value)) : std::move(value);
  }

  JinjaNode with_filters(JinjaNode value) {
    for (;;) {
      if (take_sign("|")) {
        const std::string name = word("a filter");
        value = with_arguments(node(JinjaKind::filter, name, several(std::move(value))));
      } else if (take_word("is")) {
        const bool turned = take_word("not");
        value = tested(std::move(value));
        if (turned) value = node(JinjaKind::unary, "not", several(std::move(value)));
      } else {
        return value;
      }
    }
  }

  JinjaNode tested(JinjaNode value) {
    const std::string name = word("a test");
    constexpr std::array<std::string_view, 7> kBehind = {"else", "or", "and", "if", "in", "not", "is"};
    const bool value_follows = now().kind == Token::Kind::string || now().kind == Token::Kind::number || is_sign("[") || is_sign("{") ||
                               (now().kind == Token::Kind::word && std::ranges::find(kBehind, now().text) == kBehind.end());
    std::vector<JinjaNode> parts = several(std::move(value));
    if (value_follows) parts.push_back(with_members(primary()));
    return with_arguments(node(JinjaKind::test, name, std::move(parts)));
  }

  // Adds the arguments in brackets, if there are some.
  JinjaNode with_arguments(JinjaNode of) {
    if (!take_sign("(")) return of;
    while (!take_sign(")")) {
      const bool named = now().kind == Token::Kind::word && tokens_[at_ + 1].kind == Token::Kind::sign && tokens_[at_ + 1].text == "=";
      expect(named || of.names.empty(), "a named argument");
      if (named) of.names.push_back(take().text);
      if (named) ++at_;
      of.parts.push_back(expression());
      if (!is_sign(")")) expect_sign(",");
    }
    JinjaNode out = node(of.kind, of.name, std::move(of.parts));
    out.names = std::move(of.names);
    return out;
  }

  JinjaNode with_members(JinjaNode value) {
    for (;;) {
      if (take_sign(".")) {
        if (now().kind == Token::Kind::number) {
          value = node(JinjaKind::item, "", several(std::move(value), primary()));
        } else {
          const std::string name = word("a name");
          value = node(JinjaKind::attribute, name, several(std::move(value)));
        }
      } else if (take_sign("[")) {
        value = subscript(std::move(value));
      } else if (is_sign("(")) {
        value = with_arguments(node(JinjaKind::call, "", several(std::move(value))));
      } else {
        return value;
      }
    }
  }

  JinjaNode subscript(JinjaNode of) {
    std::vector<JinjaNode> bounds;
    bool sliced = false;
    for (;;) {
      bounds.push_back(is_sign(":") || is_sign("]") ? node(JinjaKind::absent, "", {}) : expression());
      if (!take_sign(":")) break;
      sliced = true;
    }
    expect_sign("]");
    expect(bounds.size() <= 3 && (sliced || bounds[0].kind != JinjaKind::absent), "an index");
    bounds.insert(bounds.begin(), std::move(of));
    while (sliced && bounds.size() < 4) bounds.push_back(node(JinjaKind::absent, "", {}));
    return node(sliced ? JinjaKind::slice : JinjaKind::item, "", std::move(bounds));
  }

  JinjaNode primary() {
    const Token token = take();
    switch (token.kind) {
      case Token::Kind::word: return named_value(token.text);
      case Token::Kind::number: return number(token);
      case Token::Kind::string: {
        std::string text = token.text;
        while (now().kind == Token::Kind::string) text += take().text;
        return constant(text);
      }
      default: break;
    }
    if (token.kind == Token::Kind::sign && token.text == "(") {
      if (take_sign(")")) return node(JinjaKind::list, "", {});
      JinjaNode value = expression();
      if (is_sign(",")) return rest_of_list(std::move(value), ")");
      expect_sign(")");
      return value;
    }
    if (token.kind == Token::Kind::sign && token.text == "[")
      return take_sign("]") ? node(JinjaKind::list, "", {}) : rest_of_list(expression(), "]");
    if (token.kind == Token::Kind::sign && token.text == "{") return dictionary();
    fail_at(token.line, "expected a value", token.text.empty() ? "" : ", got \"" + shortened(token.text) + "\"");
  }

  // Parses the entries behind the first, up to a bracket; "": up to a token that begins no entry.
  JinjaNode rest_of_list(JinjaNode first, std::string_view end) {
    std::vector<JinjaNode> entries = several(std::move(first));
    while (take_sign(","))
      if (end.empty() || !is_sign(end)) entries.push_back(expression());
    if (!end.empty()) expect_sign(end);
    return node(JinjaKind::list, "", std::move(entries));
  }

  JinjaNode dictionary() {
    std::vector<JinjaNode> parts;
    while (!take_sign("}")) {
      parts.push_back(expression());
      expect_sign(":");
      parts.push_back(expression());
      if (!is_sign("}")) expect_sign(",");
    }
    return node(JinjaKind::dict, "", std::move(parts));
  }

  JinjaNode constant(Json value) const {
    JinjaNode out = node(JinjaKind::literal, "", {});
    out.value = std::move(value);
    return out;
  }

  JinjaNode named_value(const std::string& name) const {
    if (name == "true" || name == "True") return constant(true);
    if (name == "false" || name == "False") return constant(false);
    if (name == "none" || name == "None") return constant(nullptr);
    return node(JinjaKind::variable, name, {});
  }

  JinjaNode number(const Token& token) const {
    const char* const begin = token.text.data();
    const char* const end = begin + token.text.size();
    if (token.text.find('.') == std::string::npos) {
      int64_t value = 0;
      if (const auto read = std::from_chars(begin, end, value); read.ec == std::errc() && read.ptr == end) return constant(value);
    } else {
      double value = 0;
      if (const auto read = std::from_chars(begin, end, value); read.ec == std::errc() && read.ptr == end) return constant(value);
    }
    fail_at(token.line, shortened(token.text), " is no number");
  }

  Tokens tokens_;
  size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

JinjaNode parse_jinja(std::string_view source) { return Parser(jinja_tokens(source)).whole(); }

}  // namespace mantissa
