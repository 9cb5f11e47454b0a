// Formats numbers of bytes for people.
#pragma once

#include <cstdint>
#include <string>

namespace mantissa {

// Returns "512 B", "1.5 KiB", "4.5 GiB": in the largest of B, KiB, ... EiB of which there is at least one. bytes must not be negative.
std::string bytes_text(int64_t bytes);

}  // namespace mantissa
