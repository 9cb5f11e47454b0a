#include "mantissa/json/json.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <utility>

namespace mantissa {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 32;
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

enum class Comments { refused, allowed };

// Follows the parser through the raw text, one token per event, because nlohmann tells no positions. It never judges: the parser has
// accepted the token when its event arrives.
class TokenWalker {
 public:
  TokenWalker(std::string_view text, Comments comments) : text_(text), comments_(comments) {}

  // Start of the next token; the walker stands there.
  size_t start() {
    comma_ = false;
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '/' && comments_ == Comments::allowed) {
        skip_comment();
      } else if (c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == ',' || c == ':') {
        comma_ = comma_ || c == ',';
        ++at_;
      } else {
        break;
      }
    }
    return at_;
  }

  // Start of the next token; the walker stands behind it.
  size_t take() {
    const size_t begin = start();
    if (at_ == text_.size()) return begin;
    const char c = text_[at_];
    if (c == '"') {
      skip_string();
    } else if (c == '{' || c == '}' || c == '[' || c == ']') {
      ++at_;
    } else {
      at_ = std::min(text_.find_first_of(" \t\r\n,:]}/", at_), text_.size());
    }
    return begin;
  }

  size_t position() const { return at_; }
  bool trailing_comma() const { return comma_ && at_ < text_.size() && (text_[at_] == '}' || text_[at_] == ']'); }

 private:
  void skip_comment() {
    const bool line = text_.substr(at_, 2) == "//";
    const size_t end = line ? text_.find_first_of("\r\n", at_) : text_.find("*/", at_ + 2);  // as the parser ends them
    at_ = end == std::string_view::npos ? text_.size() : end + (line ? 1 : 2);
  }
  void skip_string() {
    for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] == '\\') ++at_;
    }
    at_ = std::min(at_ + 1, text_.size());
  }

  std::string_view text_;
  Comments comments_;
  size_t at_ = 0;
  bool comma_ = false;
};

// What Builder needs of the trees it builds beside what they have in common.
struct Place {
  size_t key, value;
};
void make(json& node, json&& value, const Place&) { node = std::move(value); }
void finish(json& node) {  // a vector that grew has up to as much room again
  if (node.is_array()) node.get_ref<json::array_t&>().shrink_to_fit();
}

void make(JsonNode& node, json&& value, const Place& at) {
  node = {.key = static_cast<uint32_t>(at.key), .value = static_cast<uint32_t>(at.value), .content = {}};
  if (value.is_object()) node.content.emplace<1>();
  if (value.is_array()) node.content.emplace<2>();
}
void finish(JsonNode& node) {
  if (node.is_list() && !std::as_const(node).entries().empty()) node.entries().shrink_to_fit();
}

// Receives the events of nlohmann's parser, which is not recursive, and builds the tree. Returning false stops the parser.
template <class Node>
class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, Comments comments, size_t base = 0) : walker_(text, comments), base_(base) {}

  bool null() override { return put(json()); }
  bool boolean(bool value) override { return put(json(value)); }
  bool number_integer(number_integer_t value) override { return put(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return put(json(value)); }
  bool number_float(number_float_t value, const string_t& digits) override {
    const bool integer = digits.find_first_of(".eE") == std::string::npos;
    put(json(value));
    if (integer) problem(place_of_last_, Where::value, "integer beyond 64 bits: " + shortened(digits));
    return true;
  }
  bool string(string_t& value) override { return put(json(std::move(value))); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    key_offset_ = walker_.take();
    open_.back().name = std::move(name);
    if (open_.back().node->contains(open_.back().name)) {
      problem(key_offset_, Where::value, "duplicate key " + shortened(json(open_.back().name).dump()));
    }
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const size_t offset = walker_.start();
    problem(offset, Where::container, walker_.trailing_comma() ? "comma after the last entry" : json_problem(error));
    return false;
  }

  Node root;
  std::vector<JsonProblem> problems;
  size_t more_problems = 0;

 private:
  struct Container {
    Node* node;        // stable: only the innermost container grows
    std::string name;  // of the member at hand
  };
  enum class Where { container, value };  // what a problem is about: the innermost container, or what was last put into it

  void problem(size_t offset, Where where, std::string message) {
    if (problems.size() == LocatedJson::kMostProblems) {
      ++more_problems;
    } else {
      problems.push_back({offset, key(where), std::move(message)});
    }
  }
  std::string key(Where where) const {
    const size_t names = where == Where::value || open_.empty() ? open_.size() : open_.size() - 1;
    return joined(std::span(open_).first(names), ".",
                  [](const Container& in) { return in.node->is_object() ? in.name : std::to_string(in.node->size() - 1); });
  }

  Node& place(json&& value) {
    const size_t offset = place_of_last_ = walker_.take();
    const bool member = !open_.empty() && open_.back().node->is_object();
    Node& node = open_.empty() ? root : member ? (*open_.back().node)[open_.back().name] : open_.back().node->emplace_back();
    make(node, std::move(value), {.key = base_ + (member ? key_offset_ : offset), .value = base_ + offset});
    return node;
  }
  bool put(json&& value) {
    place(std::move(value));
    return true;
  }
  bool open(json&& value) {
    open_.push_back({&place(std::move(value)), ""});
    if (open_.size() <= kMaxDepth) return true;
    problem(place_of_last_, Where::container, text("nested more than ", kMaxDepth, " levels deep"));
    return false;
  }
  bool close() {
    walker_.take();
    finish(*open_.back().node);
    open_.pop_back();
    return true;
  }

  TokenWalker walker_;
  size_t base_;
  std::vector<Container> open_;
  size_t key_offset_ = 0, place_of_last_ = 0;
};

template <class Node>
void parse(std::string_view text, Comments comments, Builder<Node>& builder) {
  if (text.starts_with(kByteOrderMark)) {
    builder.problems.push_back({0, "", "starts with a byte order mark; save the file as UTF-8 without one"});
    return;
  }
  if (const size_t zero = text.find('\0'); zero != std::string_view::npos) {  // to nlohmann it is the end, whatever follows
    builder.problems.push_back({zero, "", "a zero byte"});
    return;
  }
  json::sax_parse(text.begin(), text.end(), &builder, json::input_format_t::json, true, comments == Comments::allowed);
}

// Returns line and column after the bytes, from those before them.
void advance(uint32_t& line, uint32_t& column, std::string_view bytes) {
  for (const char c : bytes) {
    if (c == '\n') {
      ++line;
      column = 1;
    } else if (!continues_character(c)) {
      ++column;
    }
  }
}

constexpr size_t kMarkDistance = 256;

}  // namespace

std::string json_problem(const std::exception& error) {
  std::string reason = error.what();  // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while ..."
  reason.erase(0, reason.find("] ") + 2);
  if (reason.starts_with("parse error at")) reason.erase(0, reason.find(": ") + 2);
  const size_t begin = reason.find('\'') + 1, end = reason.rfind('\'');
  if (begin == 0 || begin > end) return reason;
  return reason.substr(0, begin) + shortened(std::string_view(reason).substr(begin, end - begin)) + reason.substr(end);
}

nlohmann::json parse_strict_json(std::string_view content, const std::string& source, ExitCode code) {
  Builder<json> builder(content, Comments::refused);
  parse(content, Comments::refused, builder);
  if (!builder.problems.empty()) {
    const JsonProblem& first = builder.problems.front();
    fail(code, source, ":", TextLines(content).at(first.offset), ": ", first.message);
  }
  return std::move(builder.root);
}

nlohmann::json parse_json_line(std::string_view line, const std::string& source, ExitCode code) {
  Builder<json> builder(line, Comments::refused);
  parse(line, Comments::refused, builder);
  if (!builder.problems.empty()) fail(code, source, ": ", builder.problems.front().message);
  return std::move(builder.root);
}

LocatedJson parse_located_json(std::string_view content, uint32_t base) {
  require(content.size() <= std::numeric_limits<uint32_t>::max() - base, "a JSON text beyond the positions there are");
  Builder<JsonNode> builder(content, Comments::allowed, base);
  parse(content, Comments::allowed, builder);
  return {.root = std::move(builder.root), .problems = std::move(builder.problems), .more_problems = builder.more_problems};
}

const JsonNode::Members& JsonNode::members() const {
  static const Members none;
  const auto* const own = std::get_if<std::unique_ptr<Members>>(&content);
  return own && *own ? **own : none;
}

const JsonNode::Entries& JsonNode::entries() const {
  static const Entries none;
  const auto* const own = std::get_if<std::unique_ptr<Entries>>(&content);
  return own && *own ? **own : none;
}

JsonNode::Members& JsonNode::members() {
  if (!is_object()) content.emplace<std::unique_ptr<Members>>();
  auto& own = std::get<std::unique_ptr<Members>>(content);
  if (!own) own = std::make_unique<Members>();
  return *own;
}

JsonNode::Entries& JsonNode::entries() {
  if (!is_list()) content.emplace<std::unique_ptr<Entries>>();
  auto& own = std::get<std::unique_ptr<Entries>>(content);
  if (!own) own = std::make_unique<Entries>();
  return *own;
}

nlohmann::json json_scalar_at(std::string_view content, size_t offset) {
  TokenWalker walker(content.substr(offset), Comments::refused);
  walker.take();
  return json::parse(content.substr(offset, walker.position()));
}

TextLines::TextLines(std::string_view content) : text_(content) {
  uint32_t line = 1, column = 1;
  for (size_t begin = 0; begin <= content.size(); begin += kMarkDistance) {
    marks_.push_back({line, column});
    advance(line, column, content.substr(begin, kMarkDistance));
  }
  marks_.shrink_to_fit();
}

std::string TextLines::at(size_t offset) const {
  const size_t mark = std::min(offset, text_.size()) / kMarkDistance;
  auto [line, column] = marks_[mark];
  advance(line, column, text_.substr(mark * kMarkDistance, offset - mark * kMarkDistance));
  return text(line, ':', column);
}

}  // namespace mantissa
