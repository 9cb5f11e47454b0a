#include "tools/compare/train_runs.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <map>
#include <utility>

#include "base/file.h"
#include "mantissa/base/error.h"
#include "tools/launch/launch_workers.h"

namespace mantissa::tools {
namespace {

// Runs in the child, between fork and exec: only calls that a signal handler may make.
[[noreturn]] void become_run(char* const* words, int log, pid_t parent) {
  ::setpgid(0, 0);  // Ctrl-C on a terminal reaches the parent alone, which decides
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(128 + SIGTERM);
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_DFL);
  sigset_t blocked;  // SIGUSR2 waits for the handler that asks for a save, as in launch_workers.cpp
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR2);
  ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
  const int in = ::open("/dev/null", O_RDONLY);
  if (in >= 0 && ::dup2(in, STDIN_FILENO) >= 0 && ::dup2(log, STDOUT_FILENO) >= 0 && ::dup2(log, STDERR_FILENO) >= 0)
    ::execv("/proc/self/exe", words);
  ::_exit(127);
}

class RunQueue {
 public:
  RunQueue(const std::vector<ComparedRun>& runs, int at_a_time, const RunEvents& events)
      : runs_(runs), most_(static_cast<size_t>(at_a_time)), events_(events) {}
  ~RunQueue() {  // after an error
    send(SIGTERM);
    for (const auto& [pid, process] : running_) ::waitpid(pid, nullptr, 0);
  }
  RunQueue(const RunQueue&) = delete;
  RunQueue& operator=(const RunQueue&) = delete;

  UnfinishedRuns train() {
    while (true) {
      while (!ending_ && next_ < runs_.size() && running_.size() < most_) start(runs_[next_++]);
      if (running_.empty()) return outcome_;
      pollfd wait = {.fd = signals_.fd(), .events = POLLIN, .revents = 0};
      ::poll(&wait, 1, -1);
      for (const int signal : signals_.take()) take(signal);
      reap();
    }
  }

 private:
  struct Process {
    const ComparedRun* run = nullptr;
    std::map<size_t, std::chrono::nanoseconds> time = {};  // by the number of runs that ran, it among them
  };

  void start(const ComparedRun& run) {
    const int log = ::open(run.log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
    require(log >= 0, path_failure(errno), run.log.string(), ": cannot be opened: ", system_message(errno));
    std::vector<std::string> words = run.words;
    words.insert(words.begin(), "mantissa");
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    const pid_t parent = ::getpid(), child = ::fork();
    const int error = errno;
    if (child == 0) become_run(pointers.data(), log, parent);
    ::close(log);
    require(child > 0, ExitCode::environment, "no process for ", run.name, ": ", system_message(error), " (ulimit -u)");
    ::setpgid(child, child);  // whoever is first
    count_time();
    running_[child] = {.run = &run, .time = {}};
    events_.starts(run, static_cast<int>(std::min(most_, running_.size() + runs_.size() - next_)));
  }

  // Adds the time since the last call to those of the runs that have run since, all at once.
  void count_time() {
    const auto now = std::chrono::steady_clock::now();
    for (auto& [pid, process] : running_) process.time[running_.size()] += now - counted_;
    counted_ = now;
  }

  void take(int signal) {
    if (signal == SIGCHLD) return;
    if (signal == SIGUSR2) return send(SIGUSR2);
    outcome_.killed = outcome_.killed || (signal == SIGINT && interrupted_);
    interrupted_ = interrupted_ || signal == SIGINT;
    if (outcome_.killed) return send(SIGKILL);
    outcome_.stopped = true;
    end_others();
  }

  void send(int signal) const {
    for (const auto& [pid, process] : running_) ::kill(-pid, signal);
  }

  void end_others() {
    if (!ending_) send(SIGTERM);
    ending_ = true;
  }

  void reap() {
    for (auto next = running_.begin(); next != running_.end();) {
      int status = 0;
      if (::waitpid(next->first, &status, WNOHANG) != next->first) {
        ++next;
        continue;
      }
      count_time();
      const auto [run, time] = std::move(next->second);
      next = running_.erase(next);
      const auto most = std::ranges::max_element(time, {}, [](const auto& each) { return each.second; });
      events_.ends(*run, static_cast<int>(most->first));
      take_ending(*run, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
  }

  void take_ending(const ComparedRun& run, int code) {
    if (code == 0) return events_.finished(run);
    if (code == static_cast<int>(ExitCode::numerical) && events_.diverged(run)) return;
    const bool cut = ending_ && code == 128 + SIGTERM;  // before it had anything to save
    if (code == static_cast<int>(ExitCode::stopped) || cut) {
      outcome_.stopped = outcome_.stopped || !ending_;  // by somebody else
    } else if (!outcome_.failure && !outcome_.killed) {
      outcome_.failure = {.name = run.name, .code = code, .log = run.log};
    }
    end_others();
  }

  const std::vector<ComparedRun>& runs_;
  size_t most_, next_ = 0;
  const RunEvents& events_;
  SignalQueue signals_;
  std::map<pid_t, Process> running_;
  std::chrono::steady_clock::time_point counted_ = std::chrono::steady_clock::now();
  UnfinishedRuns outcome_;
  bool ending_ = false, interrupted_ = false;
};

}  // namespace

UnfinishedRuns train_runs(const std::vector<ComparedRun>& runs, int at_a_time, const RunEvents& events) {
  return RunQueue(runs, at_a_time, events).train();
}

}  // namespace mantissa::tools
