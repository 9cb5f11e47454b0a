// Files and folders whose every system call is checked. Reads use pread, never a mapping: a file that shrinks while it is open gives an
// error, not SIGBUS. A failed fsync is never retried: the kernel may have dropped the pages already, so the file has to be written anew.
// Bytes that must survive a power cut go through PendingFile.
//
// Writing fails with Error(storage). Reading fails with Error(data), or with its kind ReadError if the system fails to read a file that may
// be intact. Messages hold the path and the reason of the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

// Thrown for EIO, EMFILE, ...: a second try may succeed.
class ReadError : public Error {
 public:
  using Error::Error;
};

// Owns one file descriptor. The destructor closes it unchecked; a writer calls sync() and close().
class File {
 public:
  File() = default;
  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();

  // Creates a file for writing; it must not exist yet. The space is reserved, so a full disk is found before the first byte is written.
  static File create(const std::filesystem::path& path, int64_t reserve_bytes = 0);
  // Opens a file of ours that create() made, perhaps in another process, to write more of it.
  static File open_for_writing(const std::filesystem::path& path);
  // Opens a regular file of ours for reading. Refuses symbolic links, folders, devices and pipes.
  static File open(const std::filesystem::path& path);
  // Opens a regular file that the user named, perhaps by a link. Throws Error(usage) if there is none; here and in read_at(),
  // Error(environment) if the system fails.
  static File open_input(const std::filesystem::path& path);

  int64_t size() const;
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  // Reads exactly out.size() bytes; a file that ends before that is an error.
  void read_at(int64_t offset, std::span<std::byte> out) const;
  // Reads all of it; a file of more than max_bytes is Error(data) before anything is allocated.
  std::string content(int64_t max_bytes) const;
  void sync();
  void close();
  const std::filesystem::path& path() const { return path_; }

 private:
  File(int fd, std::filesystem::path path, ExitCode read_failure = ExitCode::data)
      : fd_(fd), read_failure_(read_failure), path_(std::move(path)) {}
  int fd_ = -1;
  ExitCode read_failure_ = ExitCode::data;
  std::filesystem::path path_;
};

// Classifies a failed call on a path that the user named: usage if the path is at fault (nothing there, a loop of links, too long, a file
// of another kind), else environment.
ExitCode path_failure(int error_number);

// Makes the folder and those above it, as far as they are missing. Fails as path_failure() says.
void make_folders(const std::filesystem::path& path);

// Throws as path_failure() says unless a file can be written at `path`: its folder must take new files, and what is there must be a regular
// file or nothing.
void require_output_file(const std::filesystem::path& path);

void make_directory(const std::filesystem::path& path);  // the last component only; it must not exist
void sync_directory(const std::filesystem::path& path);
void rename_path(const std::filesystem::path& from, const std::filesystem::path& to);
// Renames a folder to a name that nothing has; returns false if something has it. Where the file system cannot do that in one step, it may
// replace an empty folder that appears meanwhile, but nothing else.
bool rename_folder_to_new(const std::filesystem::path& from, const std::filesystem::path& to);
// Swaps two names in one step; returns false where the file system cannot.
bool exchange_paths(const std::filesystem::path& a, const std::filesystem::path& b);

// Returns the bytes that are free for this user on the file system of `directory`; none where the system does not say.
std::optional<int64_t> free_bytes(const std::filesystem::path& directory);
// Returns the bytes that must be free to write so many: a tenth more.
int64_t room_for(int64_t bytes);
// Throws Error(storage) if fewer than room_for(bytes) are free on the file system of `directory`.
void require_free_space(const std::filesystem::path& directory, int64_t bytes);

// Returns the reason of a failed system call in words, e.g. "No space left on device".
std::string system_message(int error_number);

// Callback of work that may take minutes, called repeatedly so that the watchdog does not take it for stuck. Empty: nobody watches.
using Progressed = std::function<void()>;

// Writes a file as NAME.tmp and renames it to NAME when complete: a reader sees the old content or the new, never a part, after a power cut
// too. All failures are Error(storage).

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
