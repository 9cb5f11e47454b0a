// The names in a checkpoint folder.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace mantissa {

// Steps of the step-* folders, ascending; whether they are valid is not known. Empty if the folder is not there.
std::vector<int64_t> steps_in(const std::filesystem::path& folder);

struct LatestPointer {
  std::string name;  // a valid checkpoint name
  std::string hash;  // of its manifest
};
// nullopt if the file is missing; also, with a line in the log, if it has not the right form.
std::optional<LatestPointer> read_latest(const std::filesystem::path& folder);

}  // namespace mantissa
