// The values of a template and its syntax tree.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/json/json.h"

namespace mantissa {

// Values of templates, what operators, filters, tests and methods make of them, and how much of that a template may ask for. A value never
// changes and shares what it holds, so copies cost nothing. Only namespaces change, which no list, object or namespace may hold: so nothing
// holds itself, and how deep a value is is known when it is made. In jinja_values.cpp.

struct JinjaNode;
struct JinjaNamespace;
struct JinjaValue;
using JinjaEntries = std::vector<JinjaValue>;
using JinjaMembers = std::vector<std::pair<std::string, JinjaValue>>;  // in the order in which they were added

// Counts bytes that are made or looked at, which bounds time and memory. Throws Error(data) beyond the limit.
class JinjaWork {
 public:
  void add(size_t bytes) {
    constexpr size_t kMost = size_t{1} << 25;
    done_ += bytes;
    require(done_ <= kMost, ExitCode::data, "the template does too much");
  }

 private:
  size_t done_ = 0;
};

struct JinjaUndefined {
  std::shared_ptr<const std::string> name = {};
};
struct JinjaFunction {
  const JinjaNode* macro;  // null: the given function of its name
};
struct JinjaValue {
  std::variant<JinjaUndefined, std::monostate, bool, int64_t, double, std::shared_ptr<const std::string>,
               std::shared_ptr<const JinjaEntries>, std::shared_ptr<const JinjaMembers>, std::shared_ptr<JinjaNamespace>, JinjaFunction>
      content = JinjaUndefined{};
  int depth = 0;  // levels of lists and objects

  template <class T>
  const T* get() const {
    return std::get_if<T>(&content);
  }
  template <class T>
  T* shared() const {  // null if this is no T
    const auto* const found = std::get_if<std::shared_ptr<T>>(&content);
    return found != nullptr ? found->get() : nullptr;
  }
  bool is_undefined() const { return get<JinjaUndefined>() != nullptr; }
  bool is_none() const { return get<std::monostate>() != nullptr; }
  const std::string* string() const { return shared<const std::string>(); }
  const JinjaEntries* entries() const { return shared<const JinjaEntries>(); }
  const JinjaMembers* members() const { return shared<const JinjaMembers>(); }
};

struct JinjaNamespace {
  JinjaMembers members = {};
};
struct JinjaArguments {
  JinjaEntries values = {};
  JinjaMembers named = {};
};

JinjaValue jinja_value(const Json& json, JinjaWork& work);
JinjaValue jinja_undefined(const std::string& name, JinjaWork& work);
JinjaValue jinja_text(std::string text, JinjaWork& work);
JinjaValue jinja_list(JinjaEntries entries, JinjaWork& work);
JinjaValue jinja_object(JinjaMembers members, JinjaWork& work);

// All throw Error(data), without a line, for operations that these values do not have or that are not supported.
bool is_true(const JinjaValue& value);
std::string printed(const JinjaValue& value, JinjaWork& work);
void set_member(JinjaMembers& members, const std::string& name, JinjaValue value, JinjaWork& work);
JinjaEntries entries_of(const JinjaValue& value, JinjaWork& work);  // entries that a loop goes through
// Returns the arguments in the order of the parameters; null: not given.
std::vector<const JinjaValue*> in_order(const std::string& name, const JinjaArguments& arguments,
                                        const std::vector<std::string>& parameters, size_t required = 0);
JinjaValue binary_result(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work);
bool compares(const std::string& name, const JinjaValue& left, const JinjaValue& right, JinjaWork& work);
JinjaValue item_of(const JinjaValue& value, const JinjaValue& index, JinjaWork& work);
JinjaValue attribute_of(const JinjaValue& value, const std::string& name, JinjaWork& work);
JinjaValue slice_of(const JinjaValue& value, const JinjaEntries& bounds, JinjaWork& work);  // first, last, step
std::optional<JinjaValue> method_result(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments, JinjaWork& work);
JinjaValue filtered(const std::string& name, const JinjaValue& value, const JinjaArguments& arguments, JinjaWork& work);
bool passes(const std::string& name, const JinjaValue& value, const JinjaValue* argument, JinjaWork& work);

// The syntax tree. In jinja_syntax.cpp.

// A node has, beside its line, `name`, `names`, `value` and its parts in this order.
enum class JinjaKind {
  absent,      // a part that is not there
  literal,     // value
  variable,    // name
  list,        // entries
  dict,        // key, value, key, value, ...
  attribute,   // name; object
  item,        // object, index
  slice,       // object, first, last, step
  call,        // function, arguments; names: of the last ones
  filter,      // name; value, arguments; names: of the last ones
  test,        // name; value, argument if there is one
  unary,       // name: not, -, +
  binary,      // name: + - * / // % ** ~
  logic,       // name: and, or; left, right
  comparison,  // names: == != < <= > >= in, "not in"; operands, one more than names, which hold together: a < b < c
  choice,      // condition, then, else
  text,        // name
  output,      // expression
  branch,      // condition, body, condition, body, ..., body of else
  loop,        // names: targets; list, condition, body, body of else
  assign,      // names: targets; name: attribute of a namespace; expression
  capture,     // names: target; name: attribute of a namespace; body
  macro,       // name; names: parameters; body, defaults of the last ones
  sequence,    // statements
  leave,       // break
  next         // continue
};

// Counts a level of what is nested for as long as it lives: parsing and rendering use the stack, as freeing a tree does.
class JinjaLevel {
 public:
  static constexpr int kMost = 200;

  explicit JinjaLevel(int& depth) : depth_(depth) { require_allowed(++depth_); }
  ~JinjaLevel() { --depth_; }
  JinjaLevel(const JinjaLevel&) = delete;
  JinjaLevel& operator=(const JinjaLevel&) = delete;

  static void require_allowed(int depth) { require(depth <= kMost, ExitCode::data, "more than ", kMost, " levels deep"); }

 private:
  int& depth_;
};

// Nodes are moved, never copied: copies of copies would be exponential in the source.
struct JinjaNode {
  JinjaNode(JinjaKind its_kind, int its_line, std::string its_name) : kind(its_kind), line(its_line), name(std::move(its_name)) {}
  JinjaNode(JinjaNode&&) noexcept = default;
  JinjaNode& operator=(JinjaNode&&) noexcept = default;
  JinjaNode(const JinjaNode&) = delete;
  JinjaNode& operator=(const JinjaNode&) = delete;
  ~JinjaNode() = default;

  void add(JinjaNode part) {
    height = std::max(height, part.height + 1);
    JinjaLevel::require_allowed(height);
    parts.push_back(std::move(part));
  }
  const JinjaNode& part(size_t i) const { return parts.at(i); }

  JinjaKind kind;
  int line;
  int height = 1;  // height of the tree
  std::string name;
  std::vector<std::string> names = {};
  JinjaValue value = {};
  std::vector<JinjaNode> parts = {};
};

// Throws Error(data) that begins with "line 3: " for what is no template.
JinjaNode parse_jinja(std::string_view source);

// Adds the line to an error of body(), which keeps it up to date.
template <class Body>
auto at_line(const int& line, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    fail(ExitCode::data, "line ", line, ": ", error.what());
  }
}

}  // namespace mantissa
