// Writes a folder as .tmp-NAME-<id> beside its place and renames it when complete: nobody sees a part of it. What a killed process left is
// deleted when the next one makes a folder of this name; .tmp-NAME-<id>.lock tells the two apart.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "mantissa/base/error.h"
#include "mantissa/io/folder_lock.h"

namespace mantissa {

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
