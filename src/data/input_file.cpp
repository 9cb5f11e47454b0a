#include "mantissa/data/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  const int error = errno;
  require(descriptor_ >= 0 || (error != ENOENT && error != ENOTDIR), ExitCode::usage, path_, ": no such file");
  require(descriptor_ >= 0, ExitCode::environment, path_, ": cannot be opened: ", std::strerror(error));
  struct stat status = {};
  if (::fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    descriptor_ = -1;
    fail(ExitCode::usage, path_, ": not a regular file");
  }
  size_ = status.st_size;
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)), size_(other.size_) {}

InputFile& InputFile::operator=(InputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(size_, other.size_);
  return *this;
}

void InputFile::read(int64_t offset, void* out, int64_t bytes) const {
  char* next = static_cast<char*>(out);
  int64_t left = bytes;
  while (left > 0) {
    const ssize_t got = ::pread(descriptor_, next, static_cast<size_t>(left), offset);
    if (got < 0 && errno == EINTR) continue;
    require(got >= 0, ExitCode::environment, path_, ": reading at byte ", offset, " failed: ", std::strerror(errno));
    require(got > 0, ExitCode::data, path_, ": ends at byte ", offset, ", ", left, " bytes short of what was expected (", size_,
            " bytes when it was opened)");
    next += got;
    offset += got;
    left -= got;
  }
}

void InputFile::for_each_window(const std::function<void(std::string_view, int64_t)>& visit) const {
  constexpr int64_t kWindow = 1 << 20;
  std::vector<char> window(static_cast<size_t>(std::min(size_, kWindow)));
  for (int64_t offset = 0; offset < size_; offset += kWindow) {
    const int64_t bytes = std::min(kWindow, size_ - offset);
    read(offset, window.data(), bytes);
    visit(std::string_view(window.data(), static_cast<size_t>(bytes)), offset);
  }
}

}  // namespace mantissa
