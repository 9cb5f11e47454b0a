#include "mantissa/io/leftovers.h"

#include <sys/random.h>

#include <cerrno>

#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/log.h"

namespace mantissa {

namespace fs = std::filesystem;

std::string unique_id() {
  Hash64 id;
  require(::getrandom(&id.value, sizeof id.value, 0) == sizeof id.value, ExitCode::environment,
          "getrandom failed: ", system_message(errno));
  return id.text();
}

bool remove_leftover(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) log_warning(path.string(), ": could not be deleted: ", error.message());
  return !error;
}

void discard(const fs::path& path) {
  const fs::path trash = path.parent_path() / (".trash-" + path.filename().string() + "-" + unique_id());
  rename_path(path, trash);
  remove_leftover(trash);
}

}  // namespace mantissa
