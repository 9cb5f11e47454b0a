#include "mantissa/io/pending_folder.h"

#include <sys/random.h>

#include <cerrno>

#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

std::string nonce() {
  Hash64 id;
  require(::getrandom(&id.value, sizeof id.value, 0) == sizeof id.value, ExitCode::environment,
          "getrandom failed: ", system_message(errno));
  return id.text();
}

}  // namespace

PendingFolder::PendingFolder(const fs::path& target) : target_(fs::absolute(without_slash(target))) {
  std::error_code error;
  require(!fs::exists(fs::symlink_status(target_, error)), ExitCode::usage, target.string(),
          ": is there already; give a name that is free");
  require(fs::is_directory(target_.parent_path(), error), ExitCode::usage, target.string(), ": there is no folder ",
          target_.parent_path().string());
  temporary_ = target_.parent_path() / (".tmp-" + target_.filename().string() + "-" + nonce());
  make_directory(temporary_);
}

PendingFolder::~PendingFolder() {
  std::error_code ignored;
  if (!published_) fs::remove_all(temporary_, ignored);
}

void PendingFolder::publish() {
  sync_directory(temporary_);
  std::error_code error;
  require(!fs::exists(fs::symlink_status(target_, error)), ExitCode::storage, target_.string(), ": is there now; it was not before");
  rename_path(temporary_, target_);
  published_ = true;
  sync_directory(target_.parent_path());
}

}  // namespace mantissa
