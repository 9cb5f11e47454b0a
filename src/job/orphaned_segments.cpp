#include "mantissa/job/orphaned_segments.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <optional>
#include <system_error>

namespace mantissa {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "ucx_shm_posix_";
constexpr time_t kEmptySeconds = 60;  // for which an empty one is left alone

// Opening a file breaks the lease of its holder by a signal, SIGIO by default, which would end this process.
bool is_held(int fd) { return ::fcntl(fd, F_SETSIG, SIGURG) != 0 || ::fcntl(fd, F_SETLEASE, F_WRLCK) != 0; }

bool may_be_new(const struct stat& status) { return status.st_size == 0 && ::time(nullptr) - status.st_mtime < kEmptySeconds; }

// Returns the bytes that the segment had; nothing if it was left alone. Other users may have placed traps, so no link is followed and
// opening never waits for the other end of a pipe.
std::optional<int64_t> remove_if_orphaned(const fs::path& file) {
  const int fd = ::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return {};
  struct stat status {};
  const bool own = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
  const bool removed = own && !may_be_new(status) && !is_held(fd) && ::unlink(file.c_str()) == 0;
  ::close(fd);
  return removed ? std::optional<int64_t>(status.st_size) : std::nullopt;
}

}  // namespace

OrphanedSegments remove_orphaned_segments(const fs::path& folder) {
  OrphanedSegments out;
  std::error_code unreadable;
  for (fs::directory_iterator at(folder, unreadable), end; !unreadable && at != end; at.increment(unreadable)) {
    if (!at->path().filename().string().starts_with(kName)) continue;
    const std::optional<int64_t> bytes = remove_if_orphaned(at->path());
    if (!bytes) continue;
    ++out.count;
    out.bytes += *bytes;
  }
  return out;
}

}  // namespace mantissa
