// How this process was started: as which of how many ranks, by what, and where the ranks meet. All of it is read from the environment,
// whose every value is checked, so that a mistake is known before a socket is opened or a file is written.
//
// Precedence: RANK and WORLD_SIZE (torchrun, mantissa launch) > Open MPI > MPICH > Slurm (only inside a step: an interactive allocation has
// its variables too) > a process alone.
#pragma once

#include <cstdint>
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
  // Where rank 0 listens. Port 0: all ranks are on this host; rank 0 takes a free port and publishes it in a file (rendezvous by `job`).
  std::string address = "127.0.0.1";
  int port = 0;
  std::string job;        // the launcher's name for this job; all its ranks have the same, and enter it into their proof
  int restart = 0;        // attempts before this one
  bool in_order = false;  // the ranks of a host follow each other; launchers may place them in any order
};

// Throws Error(usage) that names the variable and its value. Hydra names no job: its ranks on a host are those with one parent.
int64_t parent_process();
Launch launch_from_environment(const Environment& environment = process_environment(), int64_t parent = parent_process());

// "rank 3 of 8 (2 of 4 on this host), started by torchrun, meeting at 10.0.0.1:29500"
std::string describe(const Launch& launch);

// How many threads a rank takes that is told no number: its part of the host's cores, but no more than it may run on.
int threads_of_rank(const Launch& launch, int usable_cores, int online_cores);

// `mantissa launch` hands its ranks a file in memory of this name, the descriptor of which is in MANTISSA_STEP_FD, and holds a lock on it.
inline constexpr const char* kReportsName = "mantissa-reports";
// The highest finished step of this rank, for a launcher that gives up when restarts bring nothing new: written there. Does nothing where
// the descriptor is that of something else, as in a process that inherited the variable alone.
void report_step(int64_t step);
// This rank ends because that one has failed: for the same launcher, which names the rank that failed first. Behind the steps of all ranks
// of the node: the rank and one.
void report_cause(int rank);
// Whether there is such a file, and the wait for the end of that launcher, however it ends; false where nothing can be waited for.
bool has_launcher();
bool outlive_launcher();

// Slurm's notations. "n[01-04,7],m" begins with the host "n01"; "4(x2),2" are the tasks of three nodes. `variable` is whose value it is.
std::string first_host(std::string_view variable, std::string_view list);
std::vector<int> tasks_per_node(std::string_view variable, std::string_view list);

}  // namespace mantissa
