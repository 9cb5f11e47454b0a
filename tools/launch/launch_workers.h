// Starts, reads, signals and waits for the processes of one attempt of `mantissa launch`, from one thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "mantissa/base/log.h"

namespace mantissa::tools {

// Prints what the workers of `mantissa launch` write: line by line behind "[rank3]:", and unchanged into files.

// Remembers the errors that were shown: the hash of each beginning of one, and behind whose prefix.
using ShownErrors = std::map<uint64_t, std::string>;

// One stream of one worker. Lines longer than 64 KiB are cut, so that memory stays bounded.
class WorkerStream {
 public:
  // `pipe` is the reading end of one and becomes this object's. Lines are shown on `output`, if there is one; `log` is a file, or "". An
  // error, a line that begins with "error: " and the following ones with two spaces, is not shown again if another stream of `errors` has
  // shown it.
  WorkerStream(int pipe, UnblockedOutput* output, std::string prefix, const std::string& log, ShownErrors& errors);
  WorkerStream(WorkerStream&& other) noexcept;
  WorkerStream(const WorkerStream&) = delete;
  WorkerStream& operator=(const WorkerStream&) = delete;
  ~WorkerStream();

  // Returns -1 while earlier lines wait for a reader; the worker waits as long.
  int fd() const { return output_ != nullptr && output_->waiting() ? -1 : pipe_; }
  bool open() const { return pipe_ >= 0; }
  void read();       // reads all that is there; closes at the end
  void note_rest();  // notes the bytes that are in the pipe now: until they have been read, has_rest()
  bool has_rest() const { return rest_ > 0; }
  void close();                                    // shows what has no line end yet; with a rest, that is lost
  bool repeats() const { return !held_.empty(); }  // its last error was that of another
  int log_error() const { return log_error_; }     // errno of the first write to the log that failed; 0: none has

 private:
  void write_log(std::string_view bytes);
  void show(bool all);
  std::string shown(const std::string& line);

  int pipe_;
  int64_t rest_ = 0;  // bytes
  UnblockedOutput* output_;
  int log_, log_error_ = 0;
  std::string prefix_, pending_;
  ShownErrors* errors_;
  std::optional<Hash64> error_;  // hash of the error that goes on, so far
  std::string held_;             // the part of it that is held back
};

struct WorkerPlan {
  std::vector<std::string> command;
  bool trains = false;            // the command is `train` of this program: SIGUSR2 waits until the worker has a handler for it
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
