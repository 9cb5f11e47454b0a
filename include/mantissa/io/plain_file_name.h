// Checks names of files in a file that lists others beside it.
#pragma once

#include <algorithm>
#include <string_view>

namespace mantissa {

// Requires no separators and no leading dot: the name cannot leave the folder, nor mean another file than it says.
inline bool is_plain_file_name(std::string_view name) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
  };
  return !name.empty() && name.size() <= 255 && name[0] != '.' && std::all_of(name.begin(), name.end(), plain);
}

}  // namespace mantissa
