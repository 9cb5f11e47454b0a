// Requires that files of others stay unchanged while they are read: a model that is downloaded again or trained on would otherwise be read
// half old and half new. Files are identified by device, inode, size and times, which every replacement changes.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace mantissa {

class UnchangedFiles {
 public:
  // Call it before and after each time that `path` is opened, also where nothing is there. Throws Error(data) if the file is not what it
  // was the first time, and Error(environment) where the system cannot tell.
  void look_at(const std::filesystem::path& path);
  // Checks all of them again: everything read so far belongs to one state of each.
  void require_unchanged();

 private:
  using State = std::array<int64_t, 7>;  // zeros for a file that is not there
  static State state_of(const std::string& path);
  std::map<std::string, State> seen_;
};

}  // namespace mantissa
