// One process at a time owns an output folder: flock on the file LOCK in it, which holds an owner record for people and for other hosts.
// The kernel drops the lock when its owner dies, so a stale one needs no care. Where flock is local to a host (some NFS and Lustre mounts)
// the record is all there is: a lock taken over from another host is a line in the log.
#pragma once

#include <filesystem>
#include <string>

namespace mantissa {

// Throws Error(environment) naming the owner if somebody has the folder now. Writes nothing.
void require_unlocked(const std::filesystem::path& folder);

class FolderLock {
 public:
  // `job` is what the owner wants to be known by, e.g. the run's name. Throws Error(environment) naming the owner if the folder is taken,
  // and if it cannot be locked at all.
  FolderLock(const std::filesystem::path& folder, const std::string& job);
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  // False once the file was removed or replaced: another process may own the folder now.
  bool still_ours() const;

 private:
  int fd_ = -1;
  std::filesystem::path path_;
};

}  // namespace mantissa
