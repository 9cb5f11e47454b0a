// A folder that is written beside its place and renamed into it when complete: nobody sees a part of it.
#pragma once

#include <filesystem>

#include "mantissa/base/error.h"

namespace mantissa {

class PendingFolder {
 public:
  // Throws Error(usage) if there is something at `target`, or no folder for it to be in; Error(storage) if it cannot be made.
  explicit PendingFolder(const std::filesystem::path& target);
  ~PendingFolder();  // deletes it unless published
  PendingFolder(const PendingFolder&) = delete;
  PendingFolder& operator=(const PendingFolder&) = delete;

  const std::filesystem::path& path() const { return temporary_; }  // where it lies until then
  void publish();  // its files are on the disk: takes its name, which nothing else may have taken. Throws Error(storage)

 private:
  std::filesystem::path target_, temporary_;
  bool published_ = false;
};

}  // namespace mantissa
