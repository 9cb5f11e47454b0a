#include "data/pending_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "mantissa/base/error.h"

namespace mantissa {

constexpr size_t kBufferBytes = 1 << 20;

PendingFile::PendingFile(std::string path) : path_(std::move(path)), temporary_(path_ + ".tmp") {
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail_write("created");
}

PendingFile::~PendingFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void PendingFile::fail_write(const char* what) const {
  fail(ExitCode::storage, temporary_, ": cannot be ", what, ": ", std::strerror(errno));
}

void PendingFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t done = ::pwrite(descriptor_, bytes.data(), bytes.size(), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail_write("written");
    bytes = bytes.subspan(static_cast<size_t>(done));
    offset += done;
  }
}

void PendingFile::append(std::span<const std::byte> bytes) {
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  if (buffer_.size() >= kBufferBytes) flush();
}

void PendingFile::flush() {
  write_at(written_, buffer_);
  written_ += static_cast<int64_t>(buffer_.size());
  buffer_.clear();
}

void PendingFile::write_front(std::span<const std::byte> bytes) {
  flush();
  write_at(0, bytes);
}

void PendingFile::sync() {
  flush();
  if (::fsync(descriptor_) != 0) fail_write("synced");
  const int result = ::close(descriptor_);
  descriptor_ = -1;
  if (result != 0) fail_write("closed");
}

void PendingFile::publish() {
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_write("renamed");
  temporary_.clear();
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  const int folder_descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = folder_descriptor >= 0 && ::fsync(folder_descriptor) == 0;
  const int error = errno;
  if (folder_descriptor >= 0) ::close(folder_descriptor);
  require(synced, ExitCode::storage, path_, ": its folder cannot be synced: ", std::strerror(error));
}

}  // namespace mantissa
