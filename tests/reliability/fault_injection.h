// Faults at chosen file operations of this process. The executable's own definitions of the system functions below stand before the C
// library's, so the product needs no hooks. Include it in one source of an executable. Operations count from arming, in the order in which
// they happen; a kill comes instead of the operation, another action before it, an error after doing nothing (close: after closing).
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mantissa::test {

struct Fault {
  enum Kind { none, kill, error, short_write, other };
  Kind kind = none;
  int at = 0;     // the operation it hits, from 1
  int times = 1;  // it and the next ones
  int error_number = EIO;
  std::string only = {};              // counts operations of this name only; empty: all
  std::string path = {};              // and, of these, open of paths that hold this; empty: all
  bool no_exchange = false;           // the file system cannot swap two names
  std::function<void()> action = {};  // other: happens before the operation, which then succeeds
};

struct FaultState {
  Fault fault;
  int operations = 0;
  bool hit = false;
  bool armed = false;
  std::vector<std::string> calls = {};
  std::vector<std::string> synced = {};  // names of files and folders, as they were at that time
};
inline FaultState fault_state;

inline void arm_fault(const Fault& fault) { fault_state = {.fault = fault, .armed = true}; }
// Whether the fault had been reached.
inline bool disarm_fault() {
  fault_state.armed = false;
  return fault_state.hit;
}
// The calls since then, in order, of the named operations.
inline std::vector<std::string> calls_since_armed(const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const std::string& call : fault_state.calls)
    if (std::find(names.begin(), names.end(), call) != names.end()) out.push_back(call);
  return out;
}

// True if the fault hits this call; does not return from a kill.
inline bool fault_hits(const char* name, const char* path = "") {
  FaultState& state = fault_state;
  if (!state.armed) return false;
  state.calls.emplace_back(name);
  if (!state.fault.only.empty() && state.fault.only != name) return false;
  if (std::string(path).find(state.fault.path) == std::string::npos) return false;
  ++state.operations;
  if (state.operations < state.fault.at || state.operations - state.fault.at >= state.fault.times) return false;
  state.hit = true;
  if (state.fault.kind == Fault::kill) ::raise(SIGKILL);
  if (state.fault.kind == Fault::other) {
    const auto action = state.fault.action;
    state.armed = false;
    action();
    return false;
  }
  errno = state.fault.error_number;
  return true;
}

// What statvfs says of every file system; none: the truth.
inline std::optional<struct statvfs> reported_space;

template <class Function>
Function* next_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace mantissa::test

// The assembler names avoid clashes with the declarations and fortified inlines of the system headers.
extern "C" {

int injected_open(const char* path, int flags, mode_t mode) __asm__("open");
int injected_open(const char* path, int flags, mode_t mode) {
  static const auto next = mantissa::test::next_function<int(const char*, int, ...)>("open");
  return mantissa::test::fault_hits("open", path) ? -1 : next(path, flags, mode);
}

int injected_mkdir(const char* path, mode_t mode) __asm__("mkdir");
int injected_mkdir(const char* path, mode_t mode) {
  static const auto next = mantissa::test::next_function<int(const char*, mode_t)>("mkdir");
  return mantissa::test::fault_hits("mkdir") ? -1 : next(path, mode);
}

int injected_statvfs(const char* path, struct statvfs* status) __asm__("statvfs");
int injected_statvfs(const char* path, struct statvfs* status) {
  static const auto next = mantissa::test::next_function<int(const char*, struct statvfs*)>("statvfs");
  if (mantissa::test::fault_hits("statvfs")) return -1;
  if (!mantissa::test::reported_space) return next(path, status);
  *status = *mantissa::test::reported_space;
  return 0;
}

int injected_posix_fallocate(int fd, off_t offset, off_t length) __asm__("posix_fallocate");
int injected_posix_fallocate(int fd, off_t offset, off_t length) {
  static const auto next = mantissa::test::next_function<int(int, off_t, off_t)>("posix_fallocate");
  return mantissa::test::fault_hits("posix_fallocate") ? errno : next(fd, offset, length);
}

ssize_t injected_pwrite(int fd, const void* bytes, size_t count, off_t offset) __asm__("pwrite");
ssize_t injected_pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  static const auto next = mantissa::test::next_function<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  if (!mantissa::test::fault_hits("pwrite")) return next(fd, bytes, count, offset);
  const bool half = mantissa::test::fault_state.fault.kind == mantissa::test::Fault::short_write;
  return half ? next(fd, bytes, count / 2, offset) : -1;
}

// Counts only where it is asked for by name: a sweep over the operations of a save is about writing.
ssize_t injected_pread(int fd, void* bytes, size_t count, off_t offset) __asm__("pread");
ssize_t injected_pread(int fd, void* bytes, size_t count, off_t offset) {
  static const auto next = mantissa::test::next_function<ssize_t(int, void*, size_t, off_t)>("pread");
  const bool hit = mantissa::test::fault_state.fault.only == "pread" && mantissa::test::fault_hits("pread");
  return hit ? -1 : next(fd, bytes, count, offset);
}

int injected_fsync(int fd) __asm__("fsync");
int injected_fsync(int fd) {
  static const auto next = mantissa::test::next_function<int(int)>("fsync");
  if (mantissa::test::fault_state.armed) {
    const std::filesystem::path path = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd));
    mantissa::test::fault_state.synced.push_back(path.filename().string());
  }
  return mantissa::test::fault_hits("fsync") ? -1 : next(fd);
}

int injected_close(int fd) __asm__("close");
int injected_close(int fd) {
  static const auto next = mantissa::test::next_function<int(int)>("close");
  const bool hit = mantissa::test::fault_hits("close");
  const int error = errno;
  const int result = next(fd);
  if (!hit) return result;
  errno = error;
  return -1;
}

int injected_rename(const char* from, const char* to) __asm__("rename");
int injected_rename(const char* from, const char* to) {
  static const auto next = mantissa::test::next_function<int(const char*, const char*)>("rename");
  return mantissa::test::fault_hits("rename") ? -1 : next(from, to);
}

int injected_renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) __asm__("renameat2");
int injected_renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  static const auto next = mantissa::test::next_function<int(int, const char*, int, const char*, unsigned)>("renameat2");
  if (mantissa::test::fault_state.armed && mantissa::test::fault_state.fault.no_exchange) {
    errno = EINVAL;
    return -1;
  }
  return mantissa::test::fault_hits("renameat2") ? -1 : next(from_folder, from, to_folder, to, flags);
}

int injected_unlink(const char* path) __asm__("unlink");
int injected_unlink(const char* path) {
  static const auto next = mantissa::test::next_function<int(const char*)>("unlink");
  return mantissa::test::fault_hits("unlink") ? -1 : next(path);
}

int injected_unlinkat(int folder, const char* path, int flags) __asm__("unlinkat");
int injected_unlinkat(int folder, const char* path, int flags) {
  static const auto next = mantissa::test::next_function<int(int, const char*, int)>("unlinkat");
  return mantissa::test::fault_hits("unlinkat") ? -1 : next(folder, path, flags);
}

}  // extern "C"
