// Faults of scripts/soak.py, in front of the C library by LD_PRELOAD. SOAK_CONTROL names a file of shared memory by which the script chooses
// a fault and reads what was found; only files below SOAK_FOLDER are hit. It also finds what no kill can show, because a kill loses no
// page: a name that readers use is given only to what was synced. The inode of each file and folder is marked from a change to its fsync.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { kNone, kFull, kError, kReadOnly, kSlow, kShort };  // MODES in soak_faults.py
enum { kUnsynced = 1, kRenamedInside = 2 };        // marks of an inode: content or entries; a folder in it has a new name
enum { kSlots = 1 << 16, kNameBytes = 4064 };

static struct {              // the class Control of soak.py
  int64_t mode, clock_offset_ns;
  uint64_t hits, violations;  // operations that failed or were slowed; names given too early
  char name[kNameBytes];      // the latest of them
  uint8_t marks[kSlots];      // by inode
} * control;
static char folder[PATH_MAX];

__attribute__((constructor)) static void begin(void) {
  const char *const path = getenv("SOAK_CONTROL"), *const below = getenv("SOAK_FOLDER");
  const int fd = path != NULL && below != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return;
  snprintf(folder, sizeof folder, "%s/", below);
  void* const memory = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory != MAP_FAILED) control = memory;
}

#define NEXT(name)                                                        \
  static __typeof__(name)* next;                                          \
  if (next == NULL) next = (__typeof__(name)*)dlsym(RTLD_NEXT, #name)

static int is_below(const char* path) {  // relative paths are: the script starts all programs in the folder
  return control != NULL && (path[0] != '/' || strncmp(path, folder, strlen(folder)) == 0);
}
static int fd_is_below(int fd) {
  char link[64], path[PATH_MAX];
  if (control == NULL || fd <= STDERR_FILENO) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t size = readlink(link, path, sizeof path - 1);
  path[size < 0 ? 0 : size] = 0;
  return path[0] == '/' && is_below(path);
}

enum operation { kWrite, kSync, kMakeName, kChangeName };
// Returns what the operation fails with, or 0.
static int fault_of(enum operation operation) {
  static const int errors[][4] = {[kFull] = {ENOSPC, 0, ENOSPC, 0}, [kError] = {EIO, EIO, EIO, EIO}, [kReadOnly] = {0, 0, EROFS, EROFS}};
  const int64_t mode = control->mode;
  if (mode == kNone) return 0;
  if (mode == kSlow && operation <= kSync) nanosleep(&(struct timespec){.tv_nsec = operation == kSync ? 200000000 : 20000000}, NULL);
  const int error = mode < kSlow ? errors[mode][operation] : 0;
  if (error != 0 || mode == kSlow) __atomic_add_fetch(&control->hits, 1, __ATOMIC_RELAXED);
  if (error != 0) errno = error;
  return error;
}

static uint8_t* marks_of(const char* path) {
  struct stat status;
  return stat(path, &status) == 0 ? &control->marks[status.st_ino % kSlots] : NULL;
}
static void mark_fd(int fd, int mark) {  // 0: synced
  struct stat status;
  if (fstat(fd, &status) != 0) return;
  uint8_t* const marks = &control->marks[status.st_ino % kSlots];
  *marks = mark == 0 ? 0 : *marks | mark;
}
static void mark_parent(const char* path, int mark) {
  char parent[PATH_MAX];
  const char* const slash = strrchr(path, '/');
  snprintf(parent, sizeof parent, "%.*s", slash == NULL ? 1 : (int)(slash - path), slash == NULL ? "." : path);
  uint8_t* const marks = marks_of(parent);
  if (marks != NULL) *marks |= mark;
}
static void found(const char* what, const char* path) {
  __atomic_add_fetch(&control->violations, 1, __ATOMIC_RELAXED);
  snprintf(control->name, sizeof control->name, "%s: %s", path, what);
}
static void require_synced(const char* path) {
  const uint8_t* const marks = marks_of(path);
  if (marks != NULL && (*marks & kUnsynced) != 0) found("got its final name before it was synced", path);
  DIR* const entries = opendir(path);
  for (struct dirent* entry; entries != NULL && (entry = readdir(entries)) != NULL;) {
    char inner[PATH_MAX];
    if (entry->d_name[0] == '.' || snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name) >= PATH_MAX) continue;
    require_synced(inner);
  }
  if (entries != NULL) closedir(entries);
}
static void before_rename(const char* from, const char* to) {
  const char* const base = strrchr(to, '/') == NULL ? to : strrchr(to, '/') + 1;
  if (base[0] == '.') return;  // set aside, or being deleted
  require_synced(from);
  if (strcmp(base, "latest") != 0 && strcmp(base, "best") != 0) return;
  char parent[PATH_MAX];
  snprintf(parent, sizeof parent, "%.*s.", (int)(base - to), to);
  const uint8_t* const marks = marks_of(parent);
  if (marks != NULL && (*marks & kRenamedInside) != 0) found("names a checkpoint whose own name was not synced", to);
}
static void after_rename(const char* to) {
  struct stat status;
  const char* const slash = strrchr(to, '/');
  const int is_folder = slash != NULL && slash[1] != '.' && stat(to, &status) == 0 && S_ISDIR(status.st_mode);
  mark_parent(to, kUnsynced | (is_folder ? kRenamedInside : 0));
}

// Returns how much of a write is taken, -1 for nothing. A disk that becomes full takes a part first.
static ssize_t taken_of(int fd, size_t count) {
  static unsigned int writes;  // one in three is cut: what checks one file then meets a whole one beside another that is not
  const int is_short = count > 1 && ((control->mode == kShort && writes++ % 3 == 0) || (control->mode == kFull && control->hits % 2 == 0));
  if (is_short) __atomic_add_fetch(&control->hits, 1, __ATOMIC_RELAXED);
  if (!is_short && fault_of(kWrite) != 0) return -1;
  mark_fd(fd, kUnsynced);
  return (ssize_t)(is_short ? count / 2 : count);
}
ssize_t write(int fd, const void* bytes, size_t count) {
  NEXT(write);
  if (!fd_is_below(fd)) return next(fd, bytes, count);
  const ssize_t taken = taken_of(fd, count);
  return taken < 0 ? -1 : next(fd, bytes, (size_t)taken);
}
ssize_t pwrite(int fd, const void* bytes, size_t count, off_t offset) {
  NEXT(pwrite);
  if (!fd_is_below(fd)) return next(fd, bytes, count, offset);
  const ssize_t taken = taken_of(fd, count);
  return taken < 0 ? -1 : next(fd, bytes, (size_t)taken, offset);
}
int posix_fallocate(int fd, off_t offset, off_t size) {
  NEXT(posix_fallocate);
  const int error = fd_is_below(fd) && control->hits % 4 == 3 ? fault_of(kWrite) : 0;  // most reservations succeed before the disk is full
  return error != 0 ? error : next(fd, offset, size);
}
int fsync(int fd) {
  NEXT(fsync);
  const int is_hit = fd_is_below(fd);
  if (is_hit && fault_of(kSync) != 0) return -1;
  const int result = next(fd);
  if (is_hit && result == 0) mark_fd(fd, 0);
  return result;
}
int open(const char* path, int flags, ...) {
  NEXT(open);
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  const int makes = (flags & O_CREAT) != 0 && is_below(path);
  const int is_new = makes && access(path, F_OK) != 0;
  if (is_new && fault_of(kMakeName) != 0) return -1;
  if (makes && !is_new && fault_of(kChangeName) != 0) return -1;
  const int fd = next(path, flags, mode);
  if (is_new && fd >= 0) mark_fd(fd, 0), mark_parent(path, kUnsynced);
  return fd;
}
int mkdir(const char* path, mode_t mode) {
  NEXT(mkdir);
  if (is_below(path) && fault_of(kMakeName) != 0) return -1;
  const int result = next(path, mode);
  if (result == 0 && is_below(path)) *marks_of(path) = 0, mark_parent(path, kUnsynced);
  return result;
}
int rename(const char* from, const char* to) {
  NEXT(rename);
  if (!is_below(to)) return next(from, to);
  if (fault_of(kChangeName) != 0) return -1;
  before_rename(from, to);
  const int result = next(from, to);
  if (result == 0) after_rename(to);
  return result;
}
int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned int flags) {
  NEXT(renameat2);
  if (!is_below(to)) return next(from_folder, from, to_folder, to, flags);
  if (fault_of(kChangeName) != 0) return -1;
  before_rename(from, to);
  const int result = next(from_folder, from, to_folder, to, flags);
  if (result == 0) after_rename(to);
  return result;
}
int unlink(const char* path) {
  NEXT(unlink);
  return is_below(path) && fault_of(kChangeName) != 0 ? -1 : next(path);
}
int clock_gettime(clockid_t clock, struct timespec* time) {
  NEXT(clock_gettime);
  const int result = next(clock, time);
  if (result == 0 && control != NULL && clock == CLOCK_REALTIME) time->tv_sec += control->clock_offset_ns / 1000000000;
  return result;
}
time_t time(time_t* out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != NULL) *out = now.tv_sec;
  return now.tv_sec;
}
int gettimeofday(struct timeval* restrict out, void* restrict zone) {
  NEXT(gettimeofday);
  const int result = next(out, zone);
  if (result == 0 && control != NULL) out->tv_sec += control->clock_offset_ns / 1000000000;
  return result;
}
