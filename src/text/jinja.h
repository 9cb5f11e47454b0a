// Renders the chat templates that lie beside models: the part of Jinja that published ones use, with the settings of transformers (a block
// takes the line end behind it and the blanks before it along). Anybody may have made them, so the source, nesting, work, memory and output
// are bounded. The syntax tree is in jinja_syntax.cpp, operators, filters and tests are in jinja_values.cpp.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "mantissa/json/json.h"

namespace mantissa {

// Holds what a template is rendered with.
struct JinjaInput {
  Json variables = Json::Members();                                         // an object
  std::function<std::string(const std::string& format)> strftime_now = {};  // the function of this name; none: it is not defined
};

// Throws Error(data) that begins with "line 3: " if the source is not a template, uses what is not supported, cannot be computed, calls
// raise_exception(), or exceeds the limits.
std::string render_jinja(std::string_view source, const JinjaInput& input);

// Returns the text, a view into it, without the white space at its ends that str.strip() of Python, the filter trim, takes away.
std::string_view python_stripped(std::string_view text);

}  // namespace mantissa
