// Changes of the structure of JSON, for parsers that refuse nearly all changes of bytes at the first bracket.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace mantissa::fuzz {

// Returns an input in which one value of one JSON text is another one: replaced, copied, removed, under another key, or a little off. A
// JSON text begins with a bracket, at the first one of the input or at one behind a line end, a zero, or a number of eight bytes; where
// such a number was its length, it is again. draw(n) returns a number below n. Returns nothing where no JSON text was found.
std::optional<std::string> with_changed_json(std::string_view input, const std::function<size_t(size_t)>& draw);

}  // namespace mantissa::fuzz
