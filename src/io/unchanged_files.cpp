#include "mantissa/io/unchanged_files.h"

#include <sys/stat.h>

#include <cerrno>

#include "mantissa/base/error.h"
#include "mantissa/base/file.h"

namespace mantissa {

UnchangedFiles::State UnchangedFiles::state_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const int error = errno;
    require(error == ENOENT || error == ENOTDIR, path_failure(error), path, ": cannot be looked at: ", system_message(error));
    return {};
  }
  return {static_cast<int64_t>(status.st_dev),
          static_cast<int64_t>(status.st_ino),
          status.st_size,
          status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec,
          status.st_ctim.tv_sec,
          status.st_ctim.tv_nsec};
}

void UnchangedFiles::look_at(const std::filesystem::path& path) {
  const State now = state_of(path.native());
  const auto [seen, is_new] = seen_.emplace(path.native(), now);
  require(is_new || seen->second == now, ExitCode::data, path.native(),
          ": was changed or replaced while the model was read; wait until nothing writes there, and read it again");
}

void UnchangedFiles::require_unchanged() {
  for (const auto& [path, state] : seen_) look_at(path);
}

}  // namespace mantissa
