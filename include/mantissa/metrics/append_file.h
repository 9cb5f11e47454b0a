// Appends records to a log. A record is in the file on return, written by one system call unless that is cut short: only then can a kill
// leave a part of it; what a full disk or a limit on file sizes cuts short is undone. Failures must not stop training: they are counted,
// not thrown, and the next record is tried again.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace mantissa {

class AppendFile {
 public:
  // Creates the file or continues it. Throws Error(environment) if it cannot be opened.
  explicit AppendFile(const std::filesystem::path& path);
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&& other) noexcept;
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;
  ~AppendFile();

  void append(std::string_view record);
  // Removes what follows the last line end: the rest of a line that a power cut tore.
  void cut_torn_line();

  int64_t failures() const { return failures_; }  // records that were dropped
  const std::filesystem::path& path() const { return path_; }

 private:
  int fd_ = -1;
  int64_t size_ = 0;  // end of the last whole record
  int64_t failures_ = 0;
  std::filesystem::path path_;
};

}  // namespace mantissa
