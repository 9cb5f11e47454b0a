#include "mantissa/io/pending_folder.h"

#include <climits>
#include <string_view>
#include <vector>

#include "mantissa/base/file.h"
#include "mantissa/base/hash.h"
#include "mantissa/io/leftovers.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = ".tmp-", kLock = ".lock";
constexpr size_t kIdLetters = 16, kAround = kPrefix.size() + 1 + kIdLetters + kLock.size();

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

fs::path lock_of(const fs::path& pending) { return pending.string() + std::string(kLock); }

// Returns NAME of .tmp-NAME-<id>.lock.
std::optional<std::string> pending_name(const std::string& lock) {
  if (lock.size() <= kAround || !lock.starts_with(kPrefix) || !lock.ends_with(kLock)) return {};
  const size_t dash = lock.size() - kLock.size() - kIdLetters - 1;
  if (lock[dash] != '-' || !Hash64::parse(lock.substr(dash + 1, kIdLetters))) return {};
  return lock.substr(kPrefix.size(), dash - kPrefix.size());
}

// Returns the path of the folder. Throws Error(usage) as the constructor does.
fs::path checked_target(const fs::path& target) {
  require(!target.empty(), ExitCode::usage, "\"\" is no name for a folder");
  const fs::path path = fs::absolute(without_slash(target));
  require(path.filename().string().size() + kAround <= NAME_MAX, ExitCode::usage, target.string(), ": the name is longer than ",
          NAME_MAX - kAround, " bytes");
  std::error_code error;
  require(!fs::exists(fs::symlink_status(path, error)), ExitCode::usage, target.string(), ": is there already; give a name that is free");
  require(fs::is_directory(path.parent_path(), error), ExitCode::usage, target.string(), ": there is no folder ",
          path.parent_path().string());
  return path;
}

}  // namespace

void sweep_pending_folders(const fs::path& folder, const std::optional<std::string>& name) {
  std::error_code unread;  // then nothing is known to be left
  std::vector<fs::path> locks;
  for (fs::directory_iterator entry(folder, unread), end; !unread && entry != end; entry.increment(unread)) {
    const std::optional<std::string> of = pending_name(entry->path().filename().string());
    if (of && of == name.value_or(*of)) locks.push_back(entry->path());
  }
  for (const fs::path& lock : locks) {
    const std::optional<OwnerFile> owner = OwnerFile::left_at(lock);
    if (owner && remove_leftover(lock.parent_path() / lock.stem())) owner->remove();
  }
}

PendingFolder::PendingFolder(const fs::path& target) : target_(checked_target(target)) {
  const std::string name = target_.filename().string();
  sweep_pending_folders(target_.parent_path(), name);
  while (!owner_) {
    temporary_ = target_.parent_path() / text(kPrefix, name, "-", unique_id());
    owner_ = OwnerFile::create(lock_of(temporary_));
  }
  try {
    make_directory(temporary_);
  } catch (...) {
    owner_->remove();
    throw;
  }
}

PendingFolder::~PendingFolder() {
  if (published_ || remove_leftover(temporary_)) owner_->remove();
}

void PendingFolder::publish() {
  sync_directory(temporary_);
  require(rename_folder_to_new(temporary_, target_), ExitCode::storage, target_.string(), ": is there now; it was not before");
  published_ = true;
  sync_directory(target_.parent_path());
}

}  // namespace mantissa
