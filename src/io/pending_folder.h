// Writes a folder as .tmp-NAME-<id> beside its place and renames it when complete: nobody sees a part of it. What a killed process left is
// deleted when the next one makes a folder of this name; .tmp-NAME-<id>.lock tells the two apart.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "mantissa/base/error.h"

namespace mantissa {

// Gives one process at a time an output folder: flock on the file LOCK in it, which holds an owner record for people and for other hosts.
// The kernel drops the lock when its owner dies, so a stale one needs no care. Where flock is local to a host (some NFS and Lustre mounts)
// only the record protects: a lock taken over from another host is logged.

// Throws Error(environment) naming the owner if another process has the folder now. Writes nothing.
void require_unlocked(const std::filesystem::path& folder);

// An open file with an owner record, which closing unlocks.
class OpenRecord {
 public:
  OpenRecord(OpenRecord&& other) noexcept;
  OpenRecord& operator=(OpenRecord&& other) noexcept;
  OpenRecord(const OpenRecord&) = delete;
  OpenRecord& operator=(const OpenRecord&) = delete;
  ~OpenRecord();

 protected:
  OpenRecord(int fd, std::filesystem::path path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::filesystem::path path_;
};

class FolderLock : public OpenRecord {
 public:
  // `job` names the owner to others, e.g. the run's name. Throws Error(environment) naming the owner if the folder is taken, and if it
  // cannot be locked at all.
  FolderLock(const std::filesystem::path& folder, const std::string& job);
  FolderLock(FolderLock&& other) noexcept = default;
  FolderLock& operator=(FolderLock&& other) noexcept = default;
  ~FolderLock();

  // Returns false once the file was removed or replaced: another process may own the folder now.
  bool still_ours() const;
};

// A file with an owner record, locked as long as its owner works on the files beside it, and then removed. An unlocked one of this host was
// left by a process that was killed.
class OwnerFile : public OpenRecord {
 public:
  // Makes and locks one. Returns nullopt if another process has just taken it for one that was left; the next name will do. Throws
  // Error(storage), and Error(environment) where files cannot be made or locked.
  static std::optional<OwnerFile> create(const std::filesystem::path& path);
  // Locks one that was left. Returns nullopt if its owner is at work, or may be: a file of another host, which is logged.
  static std::optional<OwnerFile> left_at(const std::filesystem::path& path);

  void remove() const;  // the work is done, or undone

 private:
  OwnerFile(int fd, std::filesystem::path path) : OpenRecord(fd, std::move(path)) {}
};

// Names and deletes what killed savers leave behind, under names that nobody takes for a finished result.

// Returns a name that no other saver, of this or another process, uses for temporary files.
std::string unique_id();

// Deletes it. Returns false, and logs a warning, on failure.
bool remove_leftover(const std::filesystem::path& path);

// Deletes it under another name, so that a part of it is never taken for the whole.
void discard(const std::filesystem::path& path);

class PendingFolder {
 public:
  // Throws Error(usage) if there is something at `target`, no folder for it to be in, or its name is none or above 228 bytes;
  // Error(storage) if it cannot be made, and Error(environment) where that is not permitted or files cannot be locked.
  explicit PendingFolder(const std::filesystem::path& target);
  ~PendingFolder();  // deletes it unless published
  PendingFolder(const PendingFolder&) = delete;
  PendingFolder& operator=(const PendingFolder&) = delete;

  const std::filesystem::path& path() const { return temporary_; }  // where it lies until then
  void publish();  // its files are on the disk: takes its name, which nothing else may have taken. Throws Error(storage)

 private:
  std::filesystem::path target_, temporary_;
  std::optional<OwnerFile> owner_;
  bool published_ = false;
};

// Deletes pending folders that killed processes left in `folder`: those of `name`, or all. Keeps those that are being written, and those of
// another host, whose lock may not be visible.
void sweep_pending_folders(const std::filesystem::path& folder, const std::optional<std::string>& name = {});

}  // namespace mantissa
