// What killed processes left in /dev/shm. UCX makes a segment as a file there, ucx_shm_posix_*, and takes its name away milliseconds later:
// a process that is killed in between leaves megabytes that nothing frees.
#pragma once

#include <cstdint>
#include <filesystem>

namespace mantissa {

struct OrphanedSegments {
  int count = 0;
  int64_t bytes = 0;
};

// Removes segments of this user that no process has open or mapped, and returns what it removed. The kernel is asked, by a write lease,
// which it grants only where nobody else holds the file: processes in other containers and what /proc hides count, too. A segment is left
// alone where the file system grants no leases, and an empty one for its first minute: its maker may be about to open it.
OrphanedSegments remove_orphaned_segments(const std::filesystem::path& folder = "/dev/shm");

}  // namespace mantissa
