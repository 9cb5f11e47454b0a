// The syntax tree of a template.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/error.h"
#include "mantissa/json/json.h"

namespace mantissa {

// A node has, beside its line, `name`, `names`, `value` and its parts in this order.
enum class JinjaKind {
  absent,     // a part that is not there
  literal,    // value
  variable,   // name
  list,       // entries
  dict,       // key, value, key, value, ...
  attribute,  // name; object
  item,       // object, index
  slice,      // object, first, last, step
  call,       // function, arguments; names: of the last ones
  filter,     // name; value, arguments; names: of the last ones
  test,       // name; value, arguments
  unary,      // name: not, -, +
  binary,     // name: + - * / // % ** ~ == != < <= > >= in and or
  choice,     // condition, then, else
  text,       // name
  output,     // expression
  branch,     // condition, body, condition, body, ..., body of else
  loop,       // names: targets; list, condition, body, body of else
  assign,     // names: targets; name: attribute of a namespace; expression
  capture,    // names: target; body
  macro,      // name; names: parameters; body, defaults of the last ones
  sequence,   // statements
  leave,      // break
  next        // continue
};

struct JinjaNode {
  JinjaKind kind = JinjaKind::absent;
  int line = 0;
  int height = 1;  // height of the tree
  std::string name = {};
  std::vector<std::string> names = {};
  Json value = {};
  std::vector<JinjaNode> parts = {};

  const JinjaNode& part(size_t i) const { return parts.at(i); }
};

template <class... Parts>
[[noreturn]] void fail_at(int line, const Parts&... parts) {
  fail(ExitCode::data, "line ", line, ": ", parts...);
}

// Throws Error(data) for what is no template.
JinjaNode parse_jinja(std::string_view source);

}  // namespace mantissa
