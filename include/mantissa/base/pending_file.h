// Writes a file as NAME.tmp and renames it to NAME when complete: a reader sees the old content or the new, never a part, after a power cut
// too. All failures are Error(storage).
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "mantissa/base/file.h"

namespace mantissa {

class PendingFile {
 public:
  explicit PendingFile(const std::filesystem::path& path);  // replaces a NAME.tmp left over from a crash
  ~PendingFile();                                           // removes NAME.tmp unless published
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;

  void append(std::span<const std::byte> bytes);
  template <class T>
  void append_value(T value) {
    append(std::as_bytes(std::span<const T, 1>(&value, 1)));
  }
  template <class T>
  void append_values(const std::vector<T>& values) {
    append(std::as_bytes(std::span<const T>(values)));
  }
  // Overwrites the first bytes of the file.
  void write_front(std::span<const std::byte> bytes);

  void sync();     // everything is on the disk, still as NAME.tmp
  void publish();  // after sync(): takes its name, and the folder is synced

 private:
  void flush();

  std::filesystem::path path_, temporary_;
  File file_;
  int64_t written_ = 0;
  std::vector<std::byte> buffer_;
  bool published_ = false;
};

void write_file_atomically(const std::filesystem::path& path, std::string_view content);

}  // namespace mantissa
