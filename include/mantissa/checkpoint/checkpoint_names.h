// The names in a folder of checkpoints, and the file `latest`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/base/file.h"
#include "mantissa/base/log.h"

namespace mantissa {

// Steps of the step-* folders, ascending; whether they are valid is not known. Empty if the folder is not there.
std::vector<int64_t> steps_in(const std::filesystem::path& folder);

struct LatestPointer {
  std::string name = {};     // a valid checkpoint name
  std::string hash = {};     // of its manifest
  std::string problem = {};  // why the file says neither: it is damaged or cannot be read
};
// nullopt if there is no such file.
std::optional<LatestPointer> read_latest(const std::filesystem::path& folder);

// A failure of the system to read, on a network file system for one, may be gone the second time; only then is it believed.
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
