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
        const bool line = text_.substr(at_, 2) == "//";
        const size_t end = line ? text_.find_first_of("\r\n", at_) : text_.find("*/", at_ + 2);  // as the parser ends them
        at_ = end == std::string_view::npos ? text_.size() : end + (line ? 1 : 2);
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
      for (++at_; at_ < text_.size() && text_[at_] != '"'; ++at_) {
        if (text_[at_] == '\\') ++at_;
      }
      at_ = std::min(at_ + 1, text_.size());
    } else if (c == '{' || c == '}' || c == '[' || c == ']') {
      ++at_;
    } else {
      at_ = std::min(text_.find_first_of(" \t\r\n,:]}/", at_), text_.size());
    }
    return begin;
  }

  bool trailing_comma() const { return comma_ && at_ < text_.size() && (text_[at_] == '}' || text_[at_] == ']'); }

 private:
  std::string_view text_;
  Comments comments_;
  size_t at_ = 0;
  bool comma_ = false;
};

// Returns what the parser says of an invalid text, without its framing, which quotes what was read and may be the whole text.
std::string json_problem(const std::exception& error) {
  std::string reason = error.what();  // "[json.exception.parse_error.101] parse error at line 3, column 5: syntax error while ..."
  reason.erase(0, reason.find("] ") + 2);
  if (reason.starts_with("parse error at")) reason.erase(0, reason.find(": ") + 2);
  const size_t begin = reason.find('\'') + 1, end = reason.rfind('\'');
  if (begin == 0 || begin > end) return reason;
  return reason.substr(0, begin) + shortened(std::string_view(reason).substr(begin, end - begin)) + reason.substr(end);
}

// Receives the events of nlohmann's parser, which is not recursive, and builds the tree. Returning false stops the parser.
class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, Comments comments, uint32_t base)
      : walker_(text, comments), refuses_long_integers_(comments == Comments::allowed), base_(base) {}

  bool null() override { return put({}); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t& digits) override {
    const bool integer = digits.find_first_of(".eE") == std::string::npos;
    put(value);
    if (integer && refuses_long_integers_) problem(place_of_last_, Where::value, "integer beyond 64 bits: " + shortened(digits));
    return true;
  }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Json::Members()); }
  bool start_array(size_t) override { return open(Json::Entries()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    key_offset_ = walker_.take();
    open_.back().name = std::move(name);
    if (open_.back().value->contains(open_.back().name)) {
      problem(key_offset_, Where::value, "duplicate key " + Json(open_.back().name).shown());
    }
    return true;
  }

  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const size_t offset = walker_.start();
    problem(offset, Where::container, walker_.trailing_comma() ? "comma after the last entry" : json_problem(error));
    return false;
  }

  ParsedJson parsed;

 private:
  struct Container {
    Json* value;       // stable: only the innermost container grows
    std::string name;  // name of the member at hand
  };
  enum class Where { container, value };  // place of a problem: the innermost container, or the value last put into it

  void problem(size_t offset, Where where, std::string message) {
    if (parsed.problems.size() == ParsedJson::kMostProblems) {
      ++parsed.more_problems;
    } else {
      parsed.problems.push_back({offset, key(where), std::move(message)});
    }
  }
  std::string key(Where where) const {
    const size_t names = where == Where::value || open_.empty() ? open_.size() : open_.size() - 1;
    return joined(std::span(open_).first(names), ".",
                  [](const Container& in) { return in.value->is_object() ? in.name : std::to_string(in.value->size() - 1); });
  }

  Json& place(Json&& value) {
    const size_t offset = place_of_last_ = walker_.take();
    const bool member = !open_.empty() && open_.back().value->is_object();
    Json& at = open_.empty() ? parsed.root
               : member      ? (*open_.back().value)[open_.back().name]
                             : open_.back().value->entries().emplace_back();
    at = std::move(value);
    at.key = base_ + static_cast<uint32_t>(member ? key_offset_ : offset);
    at.place = base_ + static_cast<uint32_t>(offset);
    return at;
  }
  bool put(Json&& value) {
    place(std::move(value));
    return true;
  }
  bool open(Json&& value) {
    open_.push_back({&place(std::move(value)), ""});
    if (open_.size() <= kMaxDepth) return true;
    problem(place_of_last_, Where::container, text("nested more than ", kMaxDepth, " levels deep"));
    return false;
  }
  bool close() {
    walker_.take();
    Json& value = *open_.back().value;
    if (value.is_list() && value.size() > 0) value.entries().shrink_to_fit();  // it has up to as much room again
    open_.pop_back();
    return true;
  }

  TokenWalker walker_;
  bool refuses_long_integers_;
  uint32_t base_;
  std::vector<Container> open_;
  size_t key_offset_ = 0, place_of_last_ = 0;
};

ParsedJson parse(std::string_view text, Comments comments, uint32_t base = 0) {
  const auto refused = [](size_t offset, const char* problem) { return ParsedJson{.root = {}, .problems = {{offset, "", problem}}}; };
  if (text.size() > std::numeric_limits<uint32_t>::max() - base) return refused(0, "larger than 4 GiB");
  if (text.starts_with(kByteOrderMark)) return refused(0, "starts with a byte order mark; save the file as UTF-8 without one");
  const size_t zero = text.find('\0');  // to nlohmann it is the end, whatever follows
  if (zero != std::string_view::npos) return refused(zero, "a zero byte");
  Builder builder(text, comments, base);
  json::sax_parse(text.begin(), text.end(), &builder, json::input_format_t::json, true, comments == Comments::allowed);
  return std::move(builder.parsed);
}

// Writes values until there is enough.
class ValueWriter {
 public:
  explicit ValueWriter(int indent, Json::Order order, size_t enough = std::string::npos)
      : indent_(indent), order_(order), enough_(enough) {}

  void write(const Json& value) {
    if (value.is_list()) {
      block('[', ']', value.entries(), [&](const Json& entry) { write(entry); });
    } else if (value.is_object()) {
      block('{', '}', in_order(value.members()), [&](const Json::Members::value_type* member) {
        out_ += written(member->first) + (indent_ < 0 ? ":" : ": ");
        write(member->second);
      });
    } else {
      std::visit([&](const auto& scalar) { out_ += written(scalar); }, value.scalar());
    }
  }
  std::string take() { return std::move(out_); }

 private:
  static std::string written(std::monostate) { return "null"; }
  static std::string written(bool value) { return value ? "true" : "false"; }
  template <class T>
  static std::string written(const T& value) {
    return json(value).dump(-1, ' ', false, json::error_handler_t::replace);
  }

  std::vector<const Json::Members::value_type*> in_order(const Json::Members& members) const {
    std::vector<const Json::Members::value_type*> out;
    for (const auto& member : members) out.push_back(&member);
    if (order_ == Json::Order::keys) std::ranges::stable_sort(out, {}, [](const auto* member) { return member->second.key; });
    return out;
  }
  template <class Entries, class Each>
  void block(char open, char close, const Entries& entries, const Each& each) {
    out_ += open;
    ++depth_;
    const char* between = "";
    for (const auto& entry : entries) {
      out_ += std::exchange(between, ",");
      if (out_.size() >= enough_) return;
      new_line();
      each(entry);
    }
    --depth_;
    if (!entries.empty()) new_line();
    out_ += close;
  }
  void new_line() {
    if (indent_ >= 0) out_ += '\n' + std::string(depth_ * static_cast<size_t>(indent_), ' ');
  }

  int indent_;
  Json::Order order_;
  size_t enough_, depth_ = 0;
  std::string out_;
};

void collect_leaves(const Json& value, const std::string& path, std::map<std::string, const Json*>& leaves) {
  const auto below = [&](const auto& name) { return text(path, path.empty() ? "" : ".", name); };
  if (value.size() == 0) leaves[path] = &value;
  for (const auto& [name, member] : value.members()) collect_leaves(member, below(name), leaves);
  for (size_t i = 0; i < value.entries().size(); ++i) collect_leaves(value.entries()[i], below(i), leaves);
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

Json parse_json(std::string_view content, const std::string& source, ExitCode code) {
  ParsedJson parsed = parse_strict_json(content);
  if (!parsed.problems.empty()) {
    const JsonProblem& first = parsed.problems.front();
    fail(code, source, ":", TextLines(content).at(first.offset), ": ", first.message);
  }
  return std::move(parsed.root);
}

ParsedJson parse_strict_json(std::string_view content) { return parse(content, Comments::refused); }

Json parse_json_or_null(std::string_view content) {
  ParsedJson parsed = parse_strict_json(content);
  return parsed.problems.empty() ? std::move(parsed.root) : Json();
}

Json parse_json_line(std::string_view line, const std::string& source, ExitCode code) {
  ParsedJson parsed = parse_strict_json(line);
  if (!parsed.problems.empty()) fail(code, source, ": ", parsed.problems.front().message);
  return std::move(parsed.root);
}

ParsedJson parse_commented_json(std::string_view content, uint32_t base) { return parse(content, Comments::allowed, base); }

Json::Json(const Scalar& scalar) {
  std::visit([this](const auto& value) { *this = value; }, scalar);
}

Json::Json(std::initializer_list<Json> values) {
  const auto names = [](const Json& value) { return value.is_list() && value.size() == 2 && value.entries()[0].is_string(); };
  if (!std::all_of(values.begin(), values.end(), names)) {
    entries() = values;
  } else {
    for (const Json& pair : values) add(pair.entries()[0].string(), pair.entries()[1]);
  }
}

const char* Json::type_name() const {
  static constexpr const char* kNames[] = {"null", "boolean", "number", "number", "number", "string", "array", "object"};
  return kNames[content_.index()];
}

Scalar Json::scalar() const {
  if (is_string()) return string();
  return std::visit(
      []<class T>(const T& value) -> Scalar {
        if constexpr (std::is_arithmetic_v<T>) return value;
        return {};
      },
      content_);
}

double Json::number() const {
  if (holds<int64_t>()) return static_cast<double>(std::get<int64_t>(content_));
  return holds<uint64_t>() ? static_cast<double>(std::get<uint64_t>(content_)) : std::get<double>(content_);
}

const Json* Json::find(std::string_view name) const {
  const auto found = members().find(name);
  return found == members().end() ? nullptr : &found->second;
}

const Json& Json::at(std::string_view name) const {
  const Json* const member = find(name);
  require(member != nullptr, "a JSON value has no member \"", name, '"');
  return *member;
}

Json& Json::operator[](const std::string& name) {
  require(is_object() || is_null(), "a JSON value that is no object has no member \"", name, '"');
  return members()[name];
}

const Json& Json::get(std::string_view name) const {
  static const Json null;
  const Json* const member = find(name);
  return member != nullptr ? *member : null;
}

Json& Json::add(const std::string& name, Json value) {
  Json& member = (*this)[name];
  const uint32_t turn = member.key > 0 ? member.key : static_cast<uint32_t>(size());
  member = std::move(value);
  member.key = turn;
  return member;
}

std::string Json::dump(int indent, Order order) const {
  ValueWriter writer(indent, order);
  writer.write(*this);
  return writer.take();
}

std::string Json::shown() const {
  ValueWriter writer(-1, Order::names, 4 * kShownCharacters + 4);  // bytes, of which as many characters are shown
  writer.write(*this);
  return shortened(writer.take());
}

std::map<std::string, const Json*> leaves_of(const Json& root) {
  std::map<std::string, const Json*> leaves;
  collect_leaves(root, "", leaves);
  return leaves;
}

bool operator==(const Json& a, const Json& b) {
  const bool numbers = a.is_number() && b.is_number() && !(a.is_integer() && b.is_integer());
  return numbers ? a.number() == b.number() : a.content_ == b.content_;
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
