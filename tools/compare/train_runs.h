// Trains the runs of a comparison: child processes of this executable, so many at a time.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mantissa::tools {

struct ComparedRun {
  std::string name;                // name of its folder
  std::filesystem::path log;       // takes what the process prints
  std::vector<std::string> words;  // command line behind the name of the program
};

// Says how training ended before all runs had finished; if nothing is set, all have.
struct UnfinishedRuns {
  struct Failure {
    std::string name;
    int code = 0;  // exit code; 128 + n if signal n killed it
    std::filesystem::path log;
  };
  std::optional<Failure> failure = {};  // the first
  bool stopped = false;                 // a signal asked for it, or a run stopped by itself
  bool killed = false;                  // by a second Ctrl-C
};

struct RunEvents {
  std::function<void(const ComparedRun&, int at_a_time)> starts;  // right after its process. As many runs are then to run, it among them
  std::function<void(const ComparedRun&, int at_a_time)> ends;    // before finished and diverged. As many ran for most of its time
  std::function<void(const ComparedRun&)> finished;               // it ended well
  std::function<bool(const ComparedRun&)> diverged;  // it ended with ExitCode::numerical. Returns false where that is a failure
};

// Starts the runs in their order. A failure, and a signal that asks for an end, have the others save and stop; a run that diverged does
// not; SIGUSR2 is handed on; a second Ctrl-C kills. Runs that lose this process save and stop, too. Returns once all processes have ended.
// Throws Error as path_failure() says for a log that cannot be written, Error(environment) if a process cannot be started.
UnfinishedRuns train_runs(const std::vector<ComparedRun>& runs, int at_a_time, const RunEvents& events);

}  // namespace mantissa::tools
