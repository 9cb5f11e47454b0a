// The syntax tree of a template.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "mantissa/base/error.h"
#include "text/jinja_values.h"

namespace mantissa {

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
