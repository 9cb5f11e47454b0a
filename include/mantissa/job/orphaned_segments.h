// Cleans up what killed processes left in /dev/shm. UCX makes a segment as a file there, ucx_shm_posix_*, and unlinks it milliseconds
// later; a process that is killed in between leaves megabytes that nothing frees.
#pragma once

#include <cstdint>
#include <filesystem>

namespace mantissa {

struct OrphanedSegments {
  int count = 0;
  int64_t bytes = 0;
};

// Removes segments of this user that no process has open or mapped, and returns what it removed. It asks the kernel for a write lease,
// which is granted only if nobody else holds the file; processes in other containers and those that /proc hides count, too. It leaves a
// segment alone where the file system grants no leases, and an empty one for its first minute, because its maker may be about to open it.
OrphanedSegments remove_orphaned_segments(const std::filesystem::path& folder = "/dev/shm");

}  // namespace mantissa
