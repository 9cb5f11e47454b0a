// A file that is written beside its place as NAME.tmp and renamed into it when complete. All failures are Error(storage).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace mantissa {

class PendingFile {
 public:
  explicit PendingFile(std::string path);  // replaces a NAME.tmp left over from a crash
  ~PendingFile();                          // removes NAME.tmp unless published
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
  void publish();  // after sync(): takes its name, durably

 private:
  void flush();
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  [[noreturn]] void fail_write(const char* what) const;

  std::string path_, temporary_;
  int descriptor_ = -1;
  int64_t written_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace mantissa
