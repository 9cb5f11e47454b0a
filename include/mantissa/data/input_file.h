// A file opened for reading at any position. Reads use pread, never a mapping: a file that shrinks while it is open gives an error, not
// SIGBUS.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace mantissa {

class InputFile {
 public:
  // Throws Error(usage) if there is no such regular file, Error(environment) if it cannot be opened.
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(InputFile&& other) noexcept;
  InputFile& operator=(InputFile&& other) noexcept;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // bytes when it was opened

  // Exactly `bytes` bytes from `offset`. Throws Error(data) if the file ends before, Error(environment) if the read fails.
  void read(int64_t offset, void* out, int64_t bytes) const;

  // The whole file in order, in windows of at most 1 MiB: visit(bytes, offset of the first).
  void for_each_window(const std::function<void(std::string_view, int64_t)>& visit) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace mantissa
