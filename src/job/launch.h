// Tells how this process was started: its rank, the world size, the launcher, and the rendezvous address. All of it is read from the
// environment and checked, so that a mistake is known before a socket is opened or a file is written.
//
// Precedence: RANK and WORLD_SIZE (torchrun, mantissa launch) > Open MPI > MPICH > Slurm (only inside a step: an interactive allocation has
// its variables too) > a process alone.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "mantissa/base/error.h"

namespace mantissa {

using Environment = std::map<std::string, std::string, std::less<>>;
Environment process_environment();

inline constexpr int kMostRanks = 1 << 16;

struct Launch {
  int rank = 0, world = 1;
  int local_rank = 0, local_size = 1;  // among the ranks on this host
  std::string launcher = "a process alone";
  // Rank 0 listens there. Port 0: all ranks are on this host; rank 0 takes a free port and publishes it in a rendezvous file named by
  // `job`.
  std::string address = "127.0.0.1";
  int port = 0;
  std::string job;        // the launcher's name for this job; all its ranks have the same, and enter it into their MAC
  int restart = 0;        // attempts before this one
  bool in_order = false;  // the ranks of a host follow each other; launchers may place them in any order
};

// Throws Error(usage) that names the variable and its value. Hydra names no job: its ranks on a host are those with one parent.
int64_t parent_process();
Launch launch_from_environment(const Environment& environment = process_environment(), int64_t parent = parent_process());

// "rank 3 of 8 (2 of 4 on this host), started by torchrun, rendezvous at 10.0.0.1:29500"
std::string describe(const Launch& launch);

// Returns how many threads a rank uses if no number is configured: its share of the host's cores, but no more than it may run on.
int threads_of_rank(const Launch& launch, int usable_cores, int online_cores);

// `mantissa launch` gives its ranks a file in memory of this name, whose descriptor is in MANTISSA_STEP_FD, and holds a lock on it.
inline constexpr const char* kReportsName = "mantissa-reports";
// Writes the highest finished step of this rank there, for a launcher that gives up when restarts make no progress. Does nothing if the
// descriptor is something else, as in a process that inherited the variable alone.
void report_step(int64_t step);
// Writes that this rank ends because that one has failed, so that the launcher can name the rank that failed first. The record lies behind
// the steps of all ranks of the node and holds the rank plus one.
void report_cause(int rank);
// has_launcher() returns whether there is such a file. outlive_launcher() returns when that launcher has ended, however it ends; false if
// nothing can be waited for.
bool has_launcher();
bool outlive_launcher();

// Parse Slurm's notations. "n[01-04,7],m" begins with the host "n01"; "4(x2),2" are the tasks of three nodes. `variable` names whose value
// it is.
std::string first_host(std::string_view variable, std::string_view list);
std::vector<int> tasks_per_node(std::string_view variable, std::string_view list);

// Cleans up what killed processes left in /dev/shm. UCX makes a segment as a file there, ucx_shm_posix_*, and unlinks it milliseconds
// later; a process that is killed in between leaves megabytes that nothing frees.

struct OrphanedSegments {
  int count = 0;
  int64_t bytes = 0;
};

// Removes segments of this user that no process has open or mapped, and returns what it removed. It asks the kernel for a write lease,
// which is granted only if nobody else holds the file; processes in other containers and those that /proc hides count, too. It leaves a
// segment alone where the file system grants no leases, and an empty one for its first minute, because its maker may be about to open it.
OrphanedSegments remove_orphaned_segments(const std::filesystem::path& folder = "/dev/shm");

}  // namespace mantissa
