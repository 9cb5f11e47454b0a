// Checks limits that the system sets on this process. Kernels and libraries that exceed one would crash, so it is checked here first, by
// name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace mantissa {

// Bytes of stack that a body of parallel_for may use, with all that it calls.
inline constexpr int64_t kStackBytes = int64_t{1} << 20;

// Makes sure that the calling thread has kStackBytes left and that they are mapped. Throws Error(environment) that names limit, value and
// need.
void require_stack();

// Makes sure that `bytes` more can be mapped at this moment. Throws Error(environment) that names limit, value and need; `purpose` is its
// subject: "thread 2 of 4".
void require_memory(int64_t bytes, const std::string& purpose);

// Loads what the C library unwinds its own frames with. By itself it does so when an exception first meets one, perhaps for want of memory;
// if memory is then too short to load it, the process ends. Throws Error(environment).
void require_unwinding();

// Returns "; the address space is limited to 102400 KiB (ulimit -v)", or "" if the memory of this process is not limited.
std::string memory_limits();

// Explains why the system refuses a thread: "; this user may have 63 processes and threads (ulimit -u) ...; ask for fewer threads ...",
// with what memory_limits() says.
std::string process_limit();

// Reads how much memory a host and the control groups of this process have left, whether the kernel has killed for want of it, and how much
// this process used.
//
// Sources: /proc/meminfo; /proc/self/cgroup and /proc/self/mountinfo for the groups of this process, in cgroup v2 memory.max,
// memory.current, memory.stat and memory.events, in v1 memory.limit_in_bytes, memory.usage_in_bytes, memory.stat and memory.oom_control;
// VmHWM of /proc/self/status.

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
