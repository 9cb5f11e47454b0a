// Libraries that are loaded when they are needed.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace mantissa {

struct OpenedLibrary {
  void* handle = nullptr;  // null: none of them can be opened
  std::string text;        // the path of the file, or why not
};
OpenedLibrary open_library(std::span<const std::string> paths);  // the first that can be opened

// Returns where a library of NVIDIA may be: as the loader finds it, below the folder that one of the variables names, or where toolkits are
// installed.
std::vector<std::string> nvidia_library_paths(const std::string& name, std::span<const char* const> variables);

}  // namespace mantissa
