#include "mantissa/metrics/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "mantissa/base/file.h"
#include "mantissa/base/log.h"

namespace mantissa {
namespace {

// Removes what was written from `rest`; returns the error, or 0.
int write_part(int fd, std::string_view& rest) {
  const ssize_t written = ::write(fd, rest.data(), rest.size());
  if (written > 0) rest.remove_prefix(static_cast<size_t>(written));
  if (written > 0 || (written < 0 && errno == EINTR)) return 0;
  return written < 0 ? errno : EIO;
}

}  // namespace

AppendFile::AppendFile(const std::filesystem::path& path) : path_(path) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  require(fd_ >= 0, ExitCode::environment, path.string(), ": cannot be opened: ", system_message(errno));
  struct stat status {};
  if (::fstat(fd_, &status) == 0) size_ = status.st_size;
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), size_(other.size_), failures_(other.failures_), path_(std::move(other.path_)) {}

AppendFile& AppendFile::operator=(AppendFile&& other) noexcept {
  std::swap(fd_, other.fd_);
  size_ = other.size_;
  failures_ = other.failures_;
  path_ = std::move(other.path_);
  return *this;
}

AppendFile::~AppendFile() {
  if (fd_ >= 0) ::close(fd_);
}

void AppendFile::append(std::string_view record) {
  std::string_view rest = record;
  int error = 0;
  while (!rest.empty() && error == 0) error = write_part(fd_, rest);  // a write that took a part says nothing; the next one says why
  const auto written = static_cast<int64_t>(record.size() - rest.size());
  if (error == 0 || (written > 0 && ::ftruncate(fd_, size_) != 0)) size_ += written;  // a part that cannot be cut stays
  if (error == 0) return;
  if (failures_++ == 0) log_warning(path_.string(), ": writing failed: ", system_message(error), "; further failures are only counted");
}

void AppendFile::cut_torn_line() {
  std::array<char, 4096> block{};
  int64_t end = size_;
  while (end > 0) {
    const int64_t begin = std::max<int64_t>(0, end - static_cast<int64_t>(block.size()));
    const ssize_t got = ::pread(fd_, block.data(), static_cast<size_t>(end - begin), begin);
    if (got != end - begin) return;
    const std::string_view text(block.data(), static_cast<size_t>(got));
    const size_t newline = text.rfind('\n');
    if (newline != std::string_view::npos) {
      end = begin + static_cast<int64_t>(newline) + 1;
      break;
    }
    end = begin;
  }
  if (end == size_) return;
  log_warning(path_.string(), ": the last line is torn; its ", size_ - end, " bytes are cut");
  if (::ftruncate(fd_, end) == 0) size_ = end;
}

}  // namespace mantissa
