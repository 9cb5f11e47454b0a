// Lists the names in a folder of checkpoints, and reads the file `latest`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/base/file.h"
#include "mantissa/base/log.h"

namespace mantissa {

// Returns the steps of the step-* folders, ascending, valid or not. Empty if the folder is not there.
std::vector<int64_t> steps_in(const std::filesystem::path& folder);

struct LatestPointer {
  std::string name = {};     // a valid checkpoint name
  std::string hash = {};     // hash of its manifest
  std::string problem = {};  // why the file says neither: it is damaged or cannot be read
};
// Returns nullopt if there is no such file.
std::optional<LatestPointer> read_latest(const std::filesystem::path& folder);

// Tries twice, because a failure to read, of a network file system for example, may be gone the second time.
template <class Failure, class Body>
auto with_second_try(Body&& body) {
  try {
    return body();
  } catch (const Failure& error) {
    log_warning(error.what(), "; trying once more");
  }
  return body();
}

}  // namespace mantissa
