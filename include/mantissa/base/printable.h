// Makes text of others (paths, names, messages) safe for lines on a terminal or in a log: it must neither control the one nor forge a line
// of the other.
#pragma once

#include <string>
#include <string_view>

namespace mantissa {

// Escapes control characters, those of C1 among them, and bytes that are no UTF-8 as \xNN; a line end becomes `line_end`.
std::string printable(std::string_view text, std::string_view line_end = "\\x0a");

// Both take a byte for a column, which no character exceeds, keep UTF-8 sequences whole, and expect printable() text. without_middle()
// returns at most `most` bytes, with "..." for the middle.
std::string without_middle(std::string_view text, size_t most);
// Breaks a line into lines of at most `most` bytes (7 or more), at the last space that fits, behind a number only if need be, else
// anywhere; indented.
std::string folded(std::string_view line, size_t most);

}  // namespace mantissa
