#include "tools/launch/launch_workers.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <span>
#include <sstream>
#include <utility>

#include "base/file.h"
#include "base/limits.h"
#include "job/launch.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "tools/signals.h"

namespace mantissa::tools {
namespace {

constexpr size_t kMostPending = size_t{1} << 16;
constexpr size_t kMostErrors = 1024;  // remembered

int opened_log(const std::string& path) {
  if (path.empty()) return -1;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0666);
  require(fd >= 0, path_failure(errno), path, ": cannot be opened: ", system_message(errno));
  return fd;
}

}  // namespace

WorkerStream::WorkerStream(int pipe, UnblockedOutput* output, std::string prefix, const std::string& log, ShownErrors& errors)
    : pipe_(pipe), output_(output), log_(opened_log(log)), prefix_(std::move(prefix)), errors_(&errors) {}

WorkerStream::WorkerStream(WorkerStream&& other) noexcept
    : pipe_(std::exchange(other.pipe_, -1)),
      rest_(other.rest_),
      output_(other.output_),
      log_(std::exchange(other.log_, -1)),
      log_error_(other.log_error_),
      prefix_(std::move(other.prefix_)),
      pending_(std::move(other.pending_)),
      errors_(other.errors_),
      error_(other.error_),
      held_(std::move(other.held_)) {}

WorkerStream::~WorkerStream() {
  if (pipe_ >= 0) ::close(pipe_);
  if (log_ >= 0) ::close(log_);
}

void WorkerStream::read() {
  std::array<char, kMostPending> block;
  const ssize_t got = ::read(pipe_, block.data(), block.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) return close();
  rest_ = std::max<int64_t>(0, rest_ - got);
  const std::string_view bytes(block.data(), static_cast<size_t>(got));
  write_log(bytes);
  if (output_ != nullptr) pending_ += bytes;
  show(false);
}

void WorkerStream::note_rest() {
  int bytes = 0;
  if (pipe_ >= 0 && ::ioctl(pipe_, FIONREAD, &bytes) == 0) rest_ = bytes;
}

void WorkerStream::close() {
  show(true);
  rest_ = 0;
  if (pipe_ >= 0) ::close(std::exchange(pipe_, -1));
}

// A full disk does not stop the launcher.
void WorkerStream::write_log(std::string_view bytes) {
  while (log_ >= 0 && !bytes.empty()) {
    const ssize_t written = ::write(log_, bytes.data(), bytes.size());
    if (written < 0 && errno != EINTR) {
      log_error_ = log_error_ != 0 ? log_error_ : errno;
      return;
    }
    if (written > 0) bytes.remove_prefix(static_cast<size_t>(written));
  }
}

// Returns nothing, the line behind its prefix, or that and what was held back before it.
std::string WorkerStream::shown(const std::string& line) {
  const bool begins = line.starts_with("error: "), continues = error_ && line.starts_with("  ");
  if (!continues) {
    error_.reset();
    held_.clear();
  }
  if (!begins && !continues) return prefix_ + line;
  error_ = xxh64(std::as_bytes(std::span(line)), error_ ? error_->value : 0);
  held_ += prefix_ + line;
  const auto found = errors_->find(error_->value);
  if (found != errors_->end() && found->second != prefix_) return "";
  if (found == errors_->end() && errors_->size() < kMostErrors) errors_->emplace(error_->value, prefix_);
  return std::exchange(held_, {});
}

// Writes all at once, so that lines of several launchers do not mix.
void WorkerStream::show(bool all) {
  std::string out;
  size_t begin = 0;
  for (size_t end = pending_.find('\n'); end != std::string::npos; end = pending_.find('\n', begin)) {
    out += shown(pending_.substr(begin, end + 1 - begin));
    begin = end + 1;
  }
  pending_.erase(0, begin);
  if (!pending_.empty() && (all || pending_.size() >= kMostPending)) {
    out += prefix_ + pending_ + "\n";
    pending_.clear();
  }
  if (output_ != nullptr && !out.empty()) output_->write(out);
}

namespace {

constexpr double kGraceSeconds = 30;
constexpr double kDrainSeconds = 1;  // for output that a worker's own children hold open
// Seconds that output waits for a reader that takes none, after a signal that asks for an end and after a failure; without these it waits
// for ever, as a command that is not launched would.
constexpr double kSignaledReaderSeconds = 2, kFailedReaderSeconds = 60;
constexpr int kDiedOfSignal = 128;  // plus its number: the exit code by which shells tell it
constexpr std::array kForwarded = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int signal : kForwarded) {
    if (signal != SIGHUP || !ignores_hangup()) sigaddset(&set, signal);  // a blocked signal would come although it is ignored
  }
  return set;
}

std::pair<int, int> new_pipe() {
  int ends[2] = {-1, -1};
  const bool made = ::pipe2(ends, O_CLOEXEC) == 0;
  require(made, ExitCode::environment, "no pipe to a worker: ", system_message(errno), " (ulimit -n)");
  return {ends[0], ends[1]};
}

// Returns all variables that torchrun sets.
std::vector<std::string> environment_of(const WorkerPlan& plan, int local_rank) {
  Environment out = process_environment();
  const std::string rank = std::to_string(plan.first_rank + local_rank), world = std::to_string(plan.world);
  out["RANK"] = out["ROLE_RANK"] = rank;
  out["WORLD_SIZE"] = out["ROLE_WORLD_SIZE"] = world;
  out["LOCAL_RANK"] = std::to_string(local_rank);
  out["LOCAL_WORLD_SIZE"] = std::to_string(plan.workers);
  out["GROUP_RANK"] = std::to_string(plan.node);
  out["GROUP_WORLD_SIZE"] = std::to_string(plan.nodes);
  out["ROLE_NAME"] = "default";
  out["MASTER_ADDR"] = plan.master_address;
  out["MASTER_PORT"] = std::to_string(plan.master_port);
  out["TORCHELASTIC_RESTART_COUNT"] = std::to_string(plan.restart);
  out["TORCHELASTIC_MAX_RESTARTS"] = std::to_string(plan.most_restarts);
  out["TORCHELASTIC_RUN_ID"] = plan.run_id;
  out["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  out["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1";
  out["MANTISSA_STEP_FD"] = std::to_string(plan.step_fd);
  if (plan.workers > 1) out.try_emplace("OMP_NUM_THREADS", "1");
  if (!plan.secret.empty()) out["MANTISSA_SECRET"] = plan.secret;
  std::vector<std::string> lines;
  for (const auto& [name, value] : out) lines.push_back(name + "=" + value);
  return lines;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  out.push_back(nullptr);
  return out;
}

// Runs in the child, between fork and exec: only calls that a signal handler may make. `problem` takes errno if the command cannot be run.
// A rank that trains is born with SIGUSR2 blocked, which would otherwise end it until watch_signals() has set a handler and unblocks all. A
// wrapper gets no such mask, because a shell neither unblocks a signal nor runs a trap for one that is blocked.
[[noreturn]] void become(char* const* words, char* const* environment, bool trains, int out, int err, int problem, pid_t launcher) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(kDiedOfSignal + SIGKILL);             // it died before it could be watched
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_DFL);  // this program ignores them (mantissa.cpp)
  sigset_t blocked;
  sigemptyset(&blocked);
  if (trains) sigaddset(&blocked, SIGUSR2);
  ::sigprocmask(SIG_SETMASK, &blocked, nullptr);
  const int in = ::open("/dev/null", O_RDONLY);
  if (in >= 0 && ::dup2(in, STDIN_FILENO) >= 0 && ::dup2(out, STDOUT_FILENO) >= 0 && ::dup2(err, STDERR_FILENO) >= 0)
    ::execvpe(words[0], words, environment);
  const int error = errno;
  if (::write(problem, &error, sizeof error) < 0) ::_exit(126);
  ::_exit(127);
}

// Returns the groups of all processes that are stopped (state T).
std::set<pid_t> stopped_groups() {
  std::set<pid_t> out;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", gone)) {
    std::ifstream file(entry.path() / "stat");
    std::string line;
    std::getline(file, line);
    const size_t name_end = line.rfind(')');  // pid (name) state parent group
    if (name_end == std::string::npos) continue;
    std::istringstream fields(line.substr(name_end + 1));
    char state = 0;
    pid_t parent = 0, group = 0;
    if (fields >> state >> parent >> group && state == 'T') out.insert(group);
  }
  return out;
}

// A rank: the process that was started and its group, in which a wrapper has what it runs.
struct Worker {
  int rank = 0;
  bool leads = true;                // the process that was started has not ended
  int signal = 0, code = 0;         // how it ended
  bool members_go_on = false;       // after it
  bool died = false;                // ended by a signal, or with the code by which a shell tells that what it waited for did
  std::optional<int> members_code;  // code of members that then ended by themselves: the first failure, else 0 if nobody asked for an end
  double kill_at = HUGE_VAL;
  bool killed = false;  // it did not end within the grace time
  bool counted = true;  // as in Ending
};

class Group {
 public:
  Group(const WorkerPlan& plan, SignalQueue& signals) : plan_(plan), signals_(signals), began_(now_seconds()) {
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // processes that a dead wrapper leaves in its group are waited for here
    try {
      for (int local = 0; local < plan.workers; ++local) start(local);
    } catch (...) {
      end_all();
      throw;
    }
  }

  Attempt run() {
    while (!running_.empty()) {
      double next_kill = HUGE_VAL;
      for (const auto& [pid, worker] : running_) next_kill = std::min(next_kill, worker.kill_at);
      listen(next_kill);
      for (auto& [pid, worker] : running_) {
        if (now_seconds() < worker.kill_at) continue;
        ::kill(-pid, SIGKILL);
        worker.killed = true;
        worker.kill_at = HUGE_VAL;
      }
    }
    show_rest();
    const double drained_by = now_seconds() + kDrainSeconds;
    const auto open = [](const WorkerStream& stream) { return stream.open(); };
    while (std::any_of(streams_.begin(), streams_.end(), open) && now_seconds() < drained_by) listen(drained_by);
    show_rest();
    for (size_t i = 0; i < streams_.size(); ++i) {
      streams_[i].close();
      wait_for_reader();
      if (streams_[i].repeats()) attempt_.repeated.insert(rank_of(i));
    }
    for (const UnblockedOutput& output : shown_) {
      if (output.dropped_lines() == 0 || output.error() == EPIPE) continue;  // whoever closes a pipe wants no more
      attempt_.losses.push_back(text(count_text(output.dropped_lines(), "line"),
                                     " of output dropped: ", output.error() != 0 ? system_message(output.error()) : "nobody read them"));
    }
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i].log_error() == 0) continue;
      attempt_.losses.push_back(
          text(log_folder(rank_of(i)), kLogNames[i % 2], ": does not have all of the output: ", system_message(streams_[i].log_error())));
    }
    return attempt_;
  }

  ~Group() { end_all(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

 private:
  static constexpr std::array kLogNames = {"/stdout.log", "/stderr.log"};  // names of the two streams of each rank

  int rank_of(size_t stream) const { return plan_.first_rank + static_cast<int>(stream / 2); }

  std::string log_folder(int rank) const {
    return plan_.log_folder.empty() ? "" : text(plan_.log_folder, "/attempt_", plan_.restart, "/", rank);
  }

  void start(int local) {
    const int rank = plan_.first_rank + local;
    const std::string folder = log_folder(rank), prefix = text("[rank", rank, "]:");
    if (!folder.empty()) make_folders(folder);
    const bool visible = plan_.shown_ranks.empty() || plan_.shown_ranks.contains(rank);
    const auto stream = [&](int pipe, int target) {
      const bool shown = visible && (folder.empty() || (plan_.shown & target) != 0);
      const auto which = static_cast<size_t>(target - STDOUT_FILENO);
      streams_.emplace_back(pipe, shown ? &shown_[which] : nullptr, prefix, folder.empty() ? "" : folder + kLogNames[which], errors_);
    };
    const auto [out, to_out] = new_pipe();
    stream(out, STDOUT_FILENO);
    const auto [err, to_err] = new_pipe();
    stream(err, STDERR_FILENO);
    const auto [problem, to_problem] = new_pipe();
    std::vector<std::string> words = plan_.command, environment = environment_of(plan_, local);
    const std::vector<char*> word_list = pointers(words), variable_list = pointers(environment);
    const pid_t launcher = ::getpid(), child = ::fork();
    const int error = errno;
    if (child == 0) become(word_list.data(), variable_list.data(), plan_.trains, to_out, to_err, to_problem, launcher);
    for (const int end : {to_out, to_err, to_problem}) ::close(end);
    if (child > 0) {
      ::setpgid(child, child);  // whoever is first
      running_[child].rank = rank;
    }
    int exec_error = 0;
    const bool failed = ::read(problem, &exec_error, sizeof exec_error) == sizeof exec_error;
    ::close(problem);
    require(child > 0, ExitCode::environment, "no process for rank ", rank, ": ", system_message(error), " (ulimit -u)");
    require(!failed, ExitCode::usage, plan_.command.front(), ": cannot be run: ", system_message(exec_error));
  }

  void listen(double until) {
    std::vector<pollfd> waits = {{.fd = signals_.fd(), .events = POLLIN, .revents = 0}};
    for (const WorkerStream& stream : streams_) waits.push_back({.fd = stream.fd(), .events = POLLIN, .revents = 0});  // -1 is passed over
    for (const UnblockedOutput& output : shown_)
      waits.push_back({.fd = output.waiting() ? output.fd() : -1, .events = POLLOUT, .revents = 0});
    // The end of what a wrapper left is not always reported: its parent may be another process that it left.
    const bool looks = std::any_of(running_.begin(), running_.end(), [](const auto& worker) { return !worker.second.leads; });
    const double left = std::clamp(until - now_seconds(), 0.0, looks ? 1.0 : 60.0);
    if (::poll(waits.data(), waits.size(), static_cast<int>(std::ceil(left * 1e3))) <= 0) return reap();
    for (UnblockedOutput& output : shown_) output.flush();
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (waits[i + 1].revents != 0 && streams_[i].fd() >= 0) streams_[i].read();
    }
    for (const int signal : signals_.take()) {
      if (signal == SIGCHLD) continue;
      const bool again = signal == SIGINT && attempt_.forwarded.contains(SIGINT);
      attempt_.killed = attempt_.killed || again;
      attempt_.forwarded.insert(signal);
      send_all(again ? SIGKILL : signal);
    }
    reap();
  }

  // Shows all that is in the pipes, however long its reader takes: what a worker wrote before it ended is there, and no clock says so.
  void show_rest() {
    for (WorkerStream& stream : streams_) stream.note_rest();
    const auto has_rest = [](const WorkerStream& stream) { return stream.has_rest(); };
    while (is_behind() || std::any_of(streams_.begin(), streams_.end(), has_rest)) is_behind() ? wait_for_reader() : listen(HUGE_VAL);
  }

  // Gives up a reader only where an end was asked for.
  void wait_for_reader() {
    while (is_behind()) {
      const double waited = std::max(shown_[0].seconds_waiting(), shown_[1].seconds_waiting());
      listen(now_seconds() + reader_seconds() - waited);
      for (UnblockedOutput& output : shown_) {
        output.flush();  // its reader may have come since
        if (output.waiting() && output.seconds_waiting() >= reader_seconds()) output.give_up();
      }
    }
  }

  double reader_seconds() const {
    if (attempt_.killed) return 0;
    return signaled_to_end() ? kSignaledReaderSeconds : asked_to_end() ? kFailedReaderSeconds : HUGE_VAL;
  }

  void send_all(int signal) {
    for (const auto& [pid, worker] : running_) ::kill(-pid, signal);
  }

  bool is_behind() const { return shown_[0].waiting() || shown_[1].waiting(); }  // who reads what is shown

  bool signaled_to_end() const {
    return std::any_of(attempt_.forwarded.begin(), attempt_.forwarded.end(), [](int signal) { return signal != SIGUSR2; });
  }
  bool asked_to_end() const { return !attempt_.failures.empty() || signaled_to_end(); }

  // One child has ended, but has not been waited for, so its number and that of its group are still theirs.
  void take_ending(const siginfo_t& info) {
    const bool by_itself = info.si_code == CLD_EXITED;
    const auto found = running_.find(::getpgid(info.si_pid));
    if (found == running_.end()) return;
    Worker& worker = found->second;
    if (found->first != info.si_pid) {  // a member of the group
      // After a signal that asks for an end, success of some member (touch, tee) is not that of the command.
      const bool counts = by_itself && worker.members_go_on && worker.died && (info.si_status != 0 || !asked_to_end());
      if (counts && worker.members_code.value_or(0) == 0) worker.members_code = info.si_status;
      return;
    }
    worker.leads = false;
    worker.counted = by_itself || counts_kills_of(info.si_pid);
    worker.signal = by_itself ? 0 : info.si_status;
    worker.code = by_itself ? info.si_status : kDiedOfSignal + info.si_status;
    // A signal goes to the whole group. A wrapper dies of it at once, or its trap exits, and what it runs may save first, or go on after
    // SIGUSR2. A wrapper that ended unasked waited for what it wanted to wait for.
    worker.died = worker.code > kDiedOfSignal && worker.code <= kDiedOfSignal + SIGRTMAX;
    worker.members_go_on = by_itself ? signaled_to_end() : asked_to_end() || attempt_.forwarded.contains(worker.signal);
    if (!worker.members_go_on) ::kill(-found->first, SIGKILL);
    if (asked_to_end()) worker.kill_at = std::min(worker.kill_at, now_seconds() + kGraceSeconds);
  }

  Ending ending_of(pid_t pid, const Worker& worker) const {
    // Prefer the codes of the processes that a wrapper ran; but where they were killed after the grace time, the wrapper's own code does
    // not count.
    const bool cut = worker.killed && worker.members_go_on && worker.signal == 0;
    const int signal = cut ? SIGKILL : worker.members_code ? 0 : worker.signal;
    return {.rank = worker.rank,
            .pid = pid,
            .signal = signal,
            .code = cut ? kDiedOfSignal + SIGKILL : worker.members_code.value_or(worker.code),
            .seconds = now_seconds() - began_,
            .log = log_folder(worker.rank),
            .sent = (signal == SIGTERM && !attempt_.failures.empty()) || (signal == SIGKILL && worker.killed),
            .counted = worker.counted};
  }

  void reap() {
    for (siginfo_t info{}; ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0; info = {}) {
      take_ending(info);
      ::waitpid(info.si_pid, nullptr, 0);
    }
    std::vector<Ending> failed;
    for (auto next = running_.begin(); next != running_.end();) {
      const bool ended = !next->second.leads && (!next->second.members_go_on || ::kill(-next->first, 0) != 0);
      if (ended) {
        const Ending ending = ending_of(next->first, next->second);
        if (ending.code != 0) failed.push_back(ending);
      }
      next = ended ? running_.erase(next) : std::next(next);
    }
    if (failed.empty()) return;
    if (attempt_.failures.empty()) {
      send_all(SIGTERM);
      for (auto& [pid, worker] : running_) worker.kill_at = std::min(worker.kill_at, now_seconds() + kGraceSeconds);
    }
    attempt_.failures.insert(attempt_.failures.end(), failed.begin(), failed.end());
    for (const pid_t stopped : stopped_groups()) {  // a stopped process handles SIGTERM only when it continues, which may be never
      const auto found = running_.find(stopped);
      if (found != running_.end()) found->second.kill_at = 0;
    }
  }

  void end_all() {
    send_all(SIGKILL);
    for (const auto& [pid, worker] : running_) ::waitpid(pid, nullptr, 0);
    running_.clear();
  }

  const WorkerPlan& plan_;
  SignalQueue& signals_;
  double began_;
  std::map<pid_t, Worker> running_;  // by process, which is its group, too
  std::array<UnblockedOutput, 2> shown_{UnblockedOutput(STDOUT_FILENO), UnblockedOutput(STDERR_FILENO)};
  std::vector<WorkerStream> streams_;  // output and errors of each
  ShownErrors errors_;
  Attempt attempt_;
};

}  // namespace

SignalQueue::SignalQueue() {
  const sigset_t set = handled_signals();
  std::signal(SIGPIPE, SIG_IGN);
  ::sigprocmask(SIG_BLOCK, &set, nullptr);
  fd_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  require(fd_ >= 0, ExitCode::environment, "no signalfd: ", system_message(errno));
}

SignalQueue::~SignalQueue() {
  const sigset_t set = handled_signals();
  ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
  ::close(fd_);
}

std::vector<int> SignalQueue::take() {
  std::vector<int> out;
  signalfd_siginfo info{};
  while (::read(fd_, &info, sizeof info) == sizeof info) out.push_back(static_cast<int>(info.ssi_signo));
  return out;
}

Attempt run_workers(const WorkerPlan& plan, SignalQueue& signals) { return Group(plan, signals).run(); }

}  // namespace mantissa::tools
