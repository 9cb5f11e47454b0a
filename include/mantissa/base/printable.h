// Text of others (paths, names, messages) in lines for a terminal or a log: it must not control the one nor forge a line of the other.
#pragma once

#include <string>
#include <string_view>

namespace mantissa {

// Control characters, those of C1 among them, and bytes that are no UTF-8 as \xNN; a line end as `line_end`.
std::string printable(std::string_view text, std::string_view line_end = "\\x0a");

}  // namespace mantissa
