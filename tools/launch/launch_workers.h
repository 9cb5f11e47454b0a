// Starts, reads, signals and waits for the processes of one attempt of `mantissa launch`, from one thread.
#pragma once

#include <sys/types.h>

#include <set>
#include <string>
#include <vector>

namespace mantissa::tools {

struct WorkerPlan {
  std::vector<std::string> command;
  int workers = 1;                // on this node, each with
  int first_rank = 0, world = 1;  // ranks from here, of so many
  int node = 0, nodes = 1;
  std::string master_address;
  int master_port = 0;
  int restart = 0, most_restarts = 0;
  std::string run_id, secret;  // no secret: the environment has one, or none is wanted
  std::string log_folder;      // "": none
  int shown = 3;               // beside a log: 1 standard output, 2 standard error, 3 both
  std::set<int> shown_ranks;   // empty: all
  int step_fd = -1;            // where ranks report their steps (report_step)
};

// Says how one worker ended.
struct Ending {
  int rank = 0;
  pid_t pid = 0;
  int signal = 0;      // the signal that killed it, or 0
  int code = 0;        // 128 + signal there
  double seconds = 0;  // since the attempt began
  std::string log;     // folder of its logs, or ""
  bool sent = false;   // the signal was the launcher's, after another had failed
  // False if a wrapper put it into another control group, where out_of_memory_kills() would not show that the kernel killed it.
  bool counted = true;
};

struct Attempt {
  std::vector<Ending> failures;     // by time
  std::set<int> repeated;           // ranks whose error was shown as that of another, and not again
  std::set<int> forwarded;          // signals that were handed on
  bool killed = false;              // by a second Ctrl-C
  std::vector<std::string> losses;  // losses of output, where and why: reported
};

// Blocks the signals that a launcher forwards, and SIGCHLD, while it lives; SIGPIPE is ignored.
class SignalQueue {
 public:
  SignalQueue();
  ~SignalQueue();
  SignalQueue(const SignalQueue&) = delete;
  SignalQueue& operator=(const SignalQueue&) = delete;
  int fd() const { return fd_; }
  std::vector<int> take();  // the signals that came

 private:
  int fd_;
};

// Runs until every worker has ended. The first failure ends the others: SIGTERM, and SIGKILL after 30 s. Throws Error(usage) if the command
// cannot be run.
Attempt run_workers(const WorkerPlan& plan, SignalQueue& signals);

}  // namespace mantissa::tools
