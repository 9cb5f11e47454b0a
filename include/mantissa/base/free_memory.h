// Reads how much memory a host and the control groups of this process have left, whether the kernel has killed for want of it, and how much
// this process used.
//
// Sources: /proc/meminfo; /proc/self/cgroup and /proc/self/mountinfo for the groups of this process, in cgroup v2 memory.max,
// memory.current, memory.stat and memory.events, in v1 memory.limit_in_bytes, memory.usage_in_bytes, memory.stat and memory.oom_control;
// VmHWM of /proc/self/status.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace mantissa {

struct FreeMemory {
  int64_t bytes = 0;    // without swap; pages of files that the kernel drops on demand are free
  std::string of = {};  // "host node7", "control group /sys/fs/cgroup/job"
  uint64_t place = 0;   // equal for all processes that share it, on any host of a job
};

// Returns the free memory of the host, if known, and of each group with a limit, from that of this process upwards: a group may hold other
// processes than those below it. `root` is where proc and sys are found.
std::vector<FreeMemory> free_memory(const std::filesystem::path& root = "/");

// Returns how many processes of its control group the kernel's out-of-memory killer has ended; none if unknown.
std::optional<int64_t> out_of_memory_kills(const std::filesystem::path& root = "/");

// Returns true if out_of_memory_kills() would count a kill of that process, which may have ended but has not been waited for: not if a
// wrapper (systemd-run --scope, cgexec) put it into a group beside this one. Returns true if nothing is known about it.
bool counts_kills_of(int64_t process, const std::filesystem::path& root = "/");

// Returns the most memory that this program had resident so far, in bytes. Unlike getrusage() it does not count what the process had before
// it became this program: launchers such as torchrun are large.
int64_t peak_resident_bytes(const std::filesystem::path& root = "/");

}  // namespace mantissa
