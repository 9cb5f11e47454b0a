#include "reliability/fault_injection.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mantissa::test {
namespace {

template <class Function>
Function* next_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace
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
  if (!mantissa::test::reported_space && !mantissa::test::free_now) return next(path, status);
  *status = mantissa::test::reported_space.value_or(*status);
  if (!mantissa::test::free_now) return 0;
  status->f_frsize = 1;
  status->f_bavail = static_cast<fsblkcnt_t>(mantissa::test::free_now());
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
