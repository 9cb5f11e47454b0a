// Gives one process at a time an output folder: flock on the file LOCK in it, which holds an owner record for people and for other hosts.
// The kernel drops the lock when its owner dies, so a stale one needs no care. Where flock is local to a host (some NFS and Lustre mounts)
// only the record protects: a lock taken over from another host is logged.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

namespace mantissa {

// Throws Error(environment) naming the owner if another process has the folder now. Writes nothing.
void require_unlocked(const std::filesystem::path& folder);

class FolderLock {
 public:
  // `job` names the owner to others, e.g. the run's name. Throws Error(environment) naming the owner if the folder is taken, and if it
  // cannot be locked at all.
  FolderLock(const std::filesystem::path& folder, const std::string& job);
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  // Returns false once the file was removed or replaced: another process may own the folder now.
  bool still_ours() const;

 private:
  int fd_ = -1;
  std::filesystem::path path_;
};

// A file with an owner record, locked as long as its owner works on the files beside it, and then removed. An unlocked one of this host was
// left by a process that was killed.
class OwnerFile {
 public:
  // Makes and locks one. Returns nullopt if another process has just taken it for one that was left; the next name will do. Throws
  // Error(storage), and Error(environment) where files cannot be made or locked.
  static std::optional<OwnerFile> create(const std::filesystem::path& path);
  // Locks one that was left. Returns nullopt if its owner is at work, or may be: a file of another host, which is logged.
  static std::optional<OwnerFile> left_at(const std::filesystem::path& path);
  OwnerFile(OwnerFile&& other) noexcept;
  OwnerFile& operator=(OwnerFile&& other) noexcept;
  OwnerFile(const OwnerFile&) = delete;
  OwnerFile& operator=(const OwnerFile&) = delete;
  ~OwnerFile();  // leaves it, unlocked

  void remove() const;  // the work is done, or undone

 private:
  OwnerFile(int fd, std::filesystem::path path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::filesystem::path path_;
};

}  // namespace mantissa
