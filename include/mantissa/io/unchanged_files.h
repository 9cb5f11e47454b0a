// Files of others that must stay what they are while they are read: a model that is downloaded again or trained on would otherwise be
// read half as it was and half as it is. They are told apart by device, inode, size and times, which no replacement leaves alone.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace mantissa {

class UnchangedFiles {
 public:
  // Before and after each time that `path` is opened, also where nothing is there. Throws Error(data) if it is not what it was the first
  // time, and Error(environment) where the system cannot tell.
  void look_at(const std::filesystem::path& path);
  // All of them again: whatever was read until now is of one state of each.
  void require_unchanged();

 private:
  using State = std::array<int64_t, 7>;  // of a file that is not there zeros
  static State state_of(const std::string& path);
  std::map<std::string, State> seen_;
};

}  // namespace mantissa
