#include "mantissa/base/pending_file.h"

#include <unistd.h>

#include <cerrno>

namespace mantissa {
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
