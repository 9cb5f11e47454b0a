// Files whose every system call is checked. What must survive a power cut is written beside its place, synced, renamed into it, and the
// folder is synced after; a reader sees the old content or the new, never a part. A failed fsync is never tried again: the kernel may have
// dropped the pages already, so the file has to be written anew.
//
// Writing fails with Error(storage), reading with Error(data); a message holds the path and the reason of the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "mantissa/base/error.h"

namespace mantissa {

// Owner of one file descriptor. The destructor closes it unchecked; a writer calls sync() and close().
class File {
 public:
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // A new file for writing; it must not exist yet. The space is reserved, so a full disk is found before the first byte is written.
  static File create(const std::filesystem::path& path, int64_t reserve_bytes = 0);
  // A regular file for reading. Symbolic links, folders, devices and pipes are refused.
  static File open(const std::filesystem::path& path);

  int64_t size() const;
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  // Exactly out.size() bytes; a file that ends before that is an error.
  void read_at(int64_t offset, std::span<std::byte> out) const;
  void sync();
  void close();
  const std::filesystem::path& path() const { return path_; }

 private:
  File(int fd, std::filesystem::path path) : fd_(fd), path_(std::move(path)) {}
  int fd_ = -1;
  std::filesystem::path path_;
};

// The bytes of a file of at most max_bytes; a larger one is Error(data) before anything is allocated.
std::string read_small_file(const std::filesystem::path& path, int64_t max_bytes);

// Writes path.tmp, syncs it, renames it to path and syncs the folder. A path.tmp left over from a crash is replaced.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

void make_directory(const std::filesystem::path& path);  // the last component only; it must not exist
void sync_directory(const std::filesystem::path& path);
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
// Swaps two names in one step; false where the file system cannot.
bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b);

// Throws Error(storage) if fewer than 1.1 * bytes are free for this user on the file system of `directory`.
void require_free_space(const std::filesystem::path& directory, int64_t bytes);

// The reason of a failed system call in words, e.g. "No space left on device".
std::string system_message(int error_number);

}  // namespace mantissa
