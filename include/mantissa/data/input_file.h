// Reads a data file that the user named, at any position.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "mantissa/base/file.h"
#include "mantissa/base/progressed.h"

namespace mantissa {

class InputFile {
 public:
  static constexpr size_t kLongestLine = size_t{64} << 20;

  // Throws Error(usage) if there is no such regular file, Error(environment) if it cannot be opened.
  explicit InputFile(const std::string& path) : file_(File::open_input(path)), size_(file_.size()) {}

  const std::string& path() const { return file_.path().native(); }
  int64_t size() const { return size_; }  // bytes when it was opened

  // Reads exactly `bytes` bytes from `offset`. Throws Error(data) if the file ends before, Error(environment) if the read fails.
  void read(int64_t offset, void* out, int64_t bytes) const {
    file_.read_at(offset, {static_cast<std::byte*>(out), static_cast<size_t>(bytes)});
  }

  // Visits the whole file in order, in windows of at most 1 MiB: visit(bytes, offset of the first), and progressed() after each.
  void for_each_window(const std::function<void(std::string_view, int64_t)>& visit, const Progressed& progressed = {}) const;

  // Visits the lines of the file in order, without their ends: visit(line, number from 1). Holds one line. Throws Error(data) for one of
  // more than kLongestLine.
  void for_each_line(const std::function<void(std::string_view, int64_t)>& visit) const;

 private:
  File file_;
  int64_t size_ = 0;
};

}  // namespace mantissa
