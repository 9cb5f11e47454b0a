#include "mantissa/base/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
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

  bool trailing_comma() const { return comma_ && at_ < text_.size() && (text_[at_] == '}' || text_[at_] == ']'); }

 private:
  void skip_comment() {
    const bool line = text_.substr(at_, 2) == "//";
    const size_t end = line ? text_.find('\n', at_) : text_.find("*/", at_ + 2);
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

std::string reason_of(const nlohmann::detail::exception& error) {
  std::string reason = error.what();  // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while ..."
  reason.erase(0, reason.find("] ") + 2);
  if (reason.starts_with("parse error at")) reason.erase(0, reason.find(": ") + 2);
  return reason;
}

// Receives the events of nlohmann's parser, which is not recursive, and builds the value. Returning false stops the parser.
class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, Comments comments) : walker_(text, comments) {}

  bool null() override { return put(json()); }
  bool boolean(bool value) override { return put(json(value)); }
  bool number_integer(number_integer_t value) override { return put(json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return put(json(value)); }
  bool number_float(number_float_t value, const string_t& digits) override {
    const bool integer = digits.find_first_of(".eE") == std::string::npos;
    put(json(value));
    if (integer) problem(place_of_last_, "integer beyond 64 bits: " + digits);
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
    key_ = std::move(name);
    if (open_.back().value->contains(key_)) {
      pointer_ = json_pointer(open_.back().pointer, key_);
      problem(key_offset_, "duplicate key " + json(key_).dump());
    }
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const size_t offset = walker_.start();
    pointer_ = open_.empty() ? "" : open_.back().pointer;
    problem(offset, walker_.trailing_comma() ? "comma after the last entry" : reason_of(error));
    return false;
  }

  json root;
  std::map<std::string, JsonPlace> places;
  std::vector<JsonProblem> problems;

 private:
  struct Container {
    json* value;  // stable: only the innermost container grows
    std::string pointer;
  };

  void problem(size_t offset, std::string message) { problems.push_back({offset, pointer_, std::move(message)}); }

  json* place(json value) {
    const size_t offset = place_of_last_ = walker_.take();
    if (open_.empty()) {
      places[pointer_ = ""] = {offset, offset};
      return &(root = std::move(value));
    }
    json& parent = *open_.back().value;
    const bool member = parent.is_object();
    pointer_ = json_pointer(open_.back().pointer, member ? key_ : std::to_string(parent.size()));
    places[pointer_] = {member ? key_offset_ : offset, offset};
    if (member) return &(parent[key_] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }
  bool put(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json value) {
    json* const opened = place(std::move(value));
    open_.push_back({opened, pointer_});
    if (open_.size() <= kMaxDepth) return true;
    problem(place_of_last_, text("nested more than ", kMaxDepth, " levels deep"));
    return false;
  }
  bool close() {
    walker_.take();
    open_.pop_back();
    return true;
  }

  TokenWalker walker_;
  std::vector<Container> open_;
  std::string key_, pointer_;
  size_t key_offset_ = 0, place_of_last_ = 0;
};

void parse(std::string_view text, Comments comments, Builder& builder) {
  if (text.starts_with(kByteOrderMark)) {
    builder.problems.push_back({0, "", "starts with a byte order mark; save the file as UTF-8 without one"});
    return;
  }
  json::sax_parse(text.begin(), text.end(), &builder, json::input_format_t::json, true, comments == Comments::allowed);
}

}  // namespace

nlohmann::json parse_strict_json(std::string_view content, const std::string& source, ExitCode code) {
  Builder builder(content, Comments::refused);
  parse(content, Comments::refused, builder);
  if (!builder.problems.empty()) {
    const JsonProblem& first = builder.problems.front();
    fail(code, source, ":", line_and_column(content, first.offset), ": ", first.message);
  }
  return std::move(builder.root);
}

LocatedJson parse_located_json(std::string_view content) {
  Builder builder(content, Comments::allowed);
  parse(content, Comments::allowed, builder);
  return {std::make_shared<const json>(std::move(builder.root)), std::move(builder.places), std::move(builder.problems)};
}

std::string json_pointer(const std::string& parent, std::string_view name) {
  std::string pointer = parent + '/';
  for (const char c : name) {
    if (c == '~') {
      pointer += "~0";
    } else if (c == '/') {
      pointer += "~1";
    } else {
      pointer += c;
    }
  }
  return pointer;
}

std::string line_and_column(std::string_view content, size_t offset) {
  const std::string_view before = content.substr(0, offset);
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const std::string_view row = before.substr(before.rfind('\n') + 1);  // npos + 1 is 0
  const auto continues = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
  const auto column = static_cast<std::ptrdiff_t>(row.size()) - std::count_if(row.begin(), row.end(), continues) + 1;
  return text(line, ':', column);
}

}  // namespace mantissa
