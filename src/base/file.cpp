#include "base/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace mantissa {
namespace {

constexpr size_t kMaxTransfer = size_t{1} << 30;  // Linux moves at most 2^31 - 4096 bytes per call

[[noreturn]] void storage_error(const std::filesystem::path& path, const char* what) {
  fail(ExitCode::storage, path.string(), ": ", what, " failed: ", system_message(errno));
}

// Returns whether nothing is there, or not a file: trying again would not help.
[[noreturn]] void read_error(const std::filesystem::path& path, const char* what) {
  const int error = errno;
  const std::string message = text(path.string(), ": ", what, " failed: ", system_message(error));
  if (error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENXIO) fail(ExitCode::data, message);
  throw ReadError(ExitCode::data, message);
}

}  // namespace

std::string system_message(int error_number) { return std::generic_category().message(error_number); }

File::File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)), read_failure_(other.read_failure_), path_(std::move(other.path_)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(read_failure_, other.read_failure_);
  std::swap(path_, other.path_);
  return *this;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

File File::create(const std::filesystem::path& path, int64_t reserve_bytes) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd < 0) storage_error(path, "creating the file");
  File file(fd, path);
  if (reserve_bytes > 0) {
    int error = 0;
    do error = ::posix_fallocate(fd, 0, reserve_bytes);
    while (error == EINTR);
    require(error == 0, ExitCode::storage, path.string(), ": reserving ", reserve_bytes, " bytes failed: ", system_message(error));
  }
  return file;
}

File File::open_for_writing(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) storage_error(path, "opening the file");
  return {fd, path};
}

File File::open(const std::filesystem::path& path) {
  // O_NONBLOCK keeps a pipe in the file's place from blocking us.
  const int fd = ::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) read_error(path, "opening");
  File file(fd, path);
  struct stat status {};
  if (::fstat(fd, &status) != 0) read_error(path, "fstat");
  require(S_ISREG(status.st_mode), ExitCode::data, path.string(), ": is not a regular file");
  return file;
}

File File::open_input(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  const int error = errno;
  require(fd >= 0 || (error != ENOENT && error != ENOTDIR), ExitCode::usage, path.string(), ": no such file");
  require(fd >= 0, path_failure(error), path.string(), ": cannot be opened: ", system_message(error));
  File file(fd, path, ExitCode::environment);
  struct stat status {};
  require(::fstat(fd, &status) == 0 && S_ISREG(status.st_mode), ExitCode::usage, path.string(), ": not a regular file");
  return file;
}

int64_t File::size() const {
  struct stat status {};
  if (::fstat(fd_, &status) != 0) read_error(path_, "fstat");
  return status.st_size;
}

void File::write_at(int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(fd_, bytes.data(), std::min(bytes.size(), kMaxTransfer), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) storage_error(path_, "writing");
    require(written > 0, ExitCode::storage, path_.string(), ": writing made no progress at byte ", offset);
    bytes = bytes.subspan(static_cast<size_t>(written));
    offset += written;
  }
}

void File::read_at(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd_, out.data(), std::min(out.size(), kMaxTransfer), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw ReadError(read_failure_, text(path_.string(), ": reading at byte ", offset, " failed: ", system_message(errno)));
    require(got > 0, ExitCode::data, path_.string(), ": ends at byte ", offset, ", ", out.size(), " bytes too early");
    out = out.subspan(static_cast<size_t>(got));
    offset += got;
  }
}

std::string File::content(int64_t max_bytes) const {
  const int64_t bytes = size();
  require(bytes <= max_bytes, ExitCode::data, path_.string(), ": has ", bytes, " bytes, at most ", max_bytes, " are accepted");
  std::string out(static_cast<size_t>(bytes), '\0');
  read_at(0, std::as_writable_bytes(std::span(out)));
  return out;
}

void File::sync() {
  if (::fsync(fd_) != 0) storage_error(path_, "fsync");
}

void File::close() {
  if (::close(std::exchange(fd_, -1)) != 0) storage_error(path_, "close");
}

ExitCode path_failure(int error_number) {
  switch (error_number) {
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EEXIST:
    case ELOOP:
    case ENAMETOOLONG:
    case ENXIO: return ExitCode::usage;  // ENXIO: a socket was opened
    default: return ExitCode::environment;
  }
}

void make_folders(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  require(!error, path_failure(error.value()), path.string(), ": the folder cannot be made: ", error.message());
}

void require_output_file(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::string temporary = path.string() + ".tmp";  // the name that PendingFile writes
  std::error_code error;
  require(path.has_filename(), ExitCode::usage, "\"", path.string(), "\" is not the name of a file to write");
  require(std::filesystem::is_directory(folder, error), ExitCode::usage, path.string(), ": there is no folder ", folder.string());
  // Other failures, as of a container that lacks the call, show when the file is written.
  const bool open_to_us = ::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0 || (errno != EACCES && errno != EROFS);
  require(open_to_us, path_failure(errno), path.string(), ": cannot be written: ", system_message(errno));
  struct stat status {};
  const bool fits = ::lstat(temporary.c_str(), &status) == 0 || errno == ENOENT;
  require(fits, path_failure(errno), path.string(), ": cannot be written: ", system_message(errno));
  const bool there = ::stat(path.c_str(), &status) == 0;
  require(there || errno == ENOENT, path_failure(errno), path.string(), ": cannot be written: ", system_message(errno));
  require(!there || S_ISREG(status.st_mode), ExitCode::usage, path.string(), ": cannot be written: it is not a regular file");
}

void make_directory(const std::filesystem::path& path) {
  if (::mkdir(path.c_str(), 0777) != 0) storage_error(path, "creating the folder");
}

void sync_directory(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) storage_error(path, "opening the folder");
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  require(result == 0, ExitCode::storage, path.string(), ": fsync of the folder failed: ", system_message(error));
}

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0)
    fail(ExitCode::storage, from.string(), ": renaming to ", to.string(), " failed: ", system_message(errno));
}

bool rename_folder_to_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return true;
  if (errno == EEXIST) return false;
  if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) storage_error(from, "renaming it");
  struct stat status {};
  if (::lstat(to.c_str(), &status) == 0) return false;
  if (::rename(from.c_str(), to.c_str()) == 0) return true;
  if (errno == EEXIST || errno == ENOTEMPTY || errno == ENOTDIR) return false;
  storage_error(from, "renaming it");
}

bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b) {
  return ::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0;
}

std::optional<int64_t> free_bytes(const std::filesystem::path& directory) {
  struct statvfs status {};
  if (::statvfs(directory.c_str(), &status) != 0) return {};
  constexpr double kMost = 9e18;
  return static_cast<int64_t>(std::min(static_cast<double>(status.f_bavail) * static_cast<double>(status.f_frsize), kMost));
}

int64_t room_for(int64_t bytes) { return static_cast<int64_t>(1.1 * static_cast<double>(bytes)); }

void require_free_space(const std::filesystem::path& directory, int64_t bytes) {
  const std::optional<int64_t> available = free_bytes(directory);
  if (!available) storage_error(directory, "statvfs");
  require(*available >= room_for(bytes), ExitCode::storage, directory.string(), ": not enough space: ", room_for(bytes), " bytes needed, ",
          *available, " free");
}

namespace {

constexpr size_t kBufferBytes = 1 << 20;

std::filesystem::path unused(std::filesystem::path path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    fail(ExitCode::storage, path.string(), ": removing the old file failed: ", system_message(errno));
  return path;
}

}  // namespace

PendingFile::PendingFile(const std::filesystem::path& path)
    : path_(path), temporary_(unused(path.string() + ".tmp")), file_(File::create(temporary_)) {}

PendingFile::~PendingFile() {
  if (!published_) ::unlink(temporary_.c_str());
}

void PendingFile::append(std::span<const std::byte> bytes) {
  if (buffer_.size() + bytes.size() >= kBufferBytes) flush();
  if (bytes.size() >= kBufferBytes) {
    file_.write_at(written_, bytes);
    written_ += static_cast<int64_t>(bytes.size());
  } else {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
}

void PendingFile::flush() {
  file_.write_at(written_, buffer_);
  written_ += static_cast<int64_t>(buffer_.size());
  buffer_.clear();
}

void PendingFile::write_front(std::span<const std::byte> bytes) {
  flush();
  file_.write_at(0, bytes);
}

void PendingFile::sync() {
  flush();
  file_.sync();
  file_.close();
  std::vector<std::byte>().swap(buffer_);
}

void PendingFile::publish() {
  rename_path(temporary_, path_);
  published_ = true;
  sync_directory(path_.has_parent_path() ? path_.parent_path() : ".");
}

void write_file_atomically(const std::filesystem::path& path, std::string_view content) {
  PendingFile file(path);
  file.append(std::as_bytes(std::span(content)));
  file.sync();
  file.publish();
}

}  // namespace mantissa
