// Text of others (paths, names, messages) in lines for a terminal or a log: it must not control the one nor forge a line of the other.
#pragma once

#include <string>
#include <string_view>

namespace mantissa {

// Control characters, those of C1 among them, and bytes that are no UTF-8 as \xNN; a line end as `line_end`.
std::string printable(std::string_view text, std::string_view line_end = "\\x0a");

// What fits into columns, which no character fills beyond its bytes. UTF-8 sequences stay whole: both expect what is printable().
// At most `most` bytes, "..." for the middle of what is longer.
std::string without_middle(std::string_view text, size_t most);
// Lines of at most `most` bytes (7 or more), broken at the last space that fits, behind a number only if need be, else anywhere; indented.
std::string folded(std::string_view line, size_t most);

}  // namespace mantissa
