// mantissa launch: one process per rank on this node, with torchrun's option names and variables, restarted together where that can help.
#include "job/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>

#include "backend/gpus.h"
#include "base/file.h"
#include "base/host_name.h"
#include "base/limits.h"
#include "base/parallel.h"
#include "job/store.h"
#include "mantissa/base/log.h"
#include "mantissa/base/text.h"
#include "tools/command.h"
#include "tools/launch/launch_workers.h"

namespace mantissa::tools {
namespace {

constexpr int kMostRestartsWithoutStep = 3;  // without a new step
constexpr int kDefaultPort = 29500;          // torchrun's

struct LaunchArguments {
  std::string workers = "1";
  int nodes = 1, node_rank = 0, max_restarts = 0;
  std::optional<int64_t> port, tee;
  std::optional<std::string> address, log_folder, ranks;
  bool standalone = false;
  std::vector<std::string> command, subcommands;
};

int number_in(const std::string& option, const std::string& value, int64_t least, int64_t most) {
  int64_t number = 0;
  const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
  require(problem == std::errc{} && end == value.data() + value.size() && number >= least && number <= most, ExitCode::usage, option,
          ": must be a whole number from ", least, " to ", most, ", got '", value, "'");
  return static_cast<int>(number);
}

int worker_count(const std::string& value) {
  const int gpus = value == "gpu" ? count_gpus() : 0;
  require(value != "gpu" || gpus > 0, ExitCode::environment, "--nproc-per-node gpu: no GPU can be used: ", find_gpus().text,
          "; give cpu or a number");
  if (gpus > 0) return gpus;
  return value == "auto" || value == "cpu" ? num_threads() : number_in("--nproc-per-node", value, 1, kMostRanks);
}

std::set<int> ranks_in(const std::string& list, int world) {
  std::set<int> out;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t comma = std::min(list.find(',', begin), list.size());
    out.insert(number_in("--ranks-filter", list.substr(begin, comma - begin), 0, world - 1));
    begin = comma + 1;
  }
  return out;
}

// Reserves a free port while it lives: it is bound but not listening, which leaves room for one listener with SO_REUSEADDR.
class ReservedPort {
 public:
  ReservedPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t size = sizeof name;
    const bool ok = fd_ >= 0 && ::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                    ::bind(fd_, reinterpret_cast<sockaddr*>(&name), size) == 0 &&
                    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&name), &size) == 0;
    require(ok, ExitCode::environment, "no free port: ", system_message(errno));
    port_ = ntohs(name.sin_port);
  }
  ~ReservedPort() { ::close(fd_); }
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;
  int port() const { return port_; }

 private:
  int fd_, port_ = 0;
};

// The ranks of this node write their highest steps there, and behind them whose failure ended them (report_step, report_cause); the workers
// inherit it.
class Reports {
 public:
  explicit Reports(int workers) : fd_(::memfd_create(kReportsName, 0)), workers_(workers), numbers_(2 * static_cast<size_t>(workers)) {
    struct flock whole {};
    whole.l_type = F_WRLCK;  // held by this process until it ends, however it ends: outlive_launcher() waits for that
    const bool made = fd_ >= 0 && ::fcntl(fd_, F_SETLK, &whole) == 0;
    require(made, ExitCode::environment, "no memory for the reports of ranks: ", system_message(errno));
    clear();
  }
  ~Reports() { ::close(fd_); }
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;

  int fd() const { return fd_; }
  void read() {
    const auto size = static_cast<size_t>(bytes());
    if (::pread(fd_, numbers_.data(), size, 0) != bytes()) numbers_.assign(numbers_.size(), 0);
  }
  int64_t highest_step() const { return *std::max_element(numbers_.begin(), numbers_.begin() + workers_); }
  int cause(int local_rank) const { return static_cast<int>(numbers_[static_cast<size_t>(workers_ + local_rank)]) - 1; }  // -1: none
  void clear() {
    const bool ok = ::ftruncate(fd_, 0) == 0 && ::ftruncate(fd_, bytes()) == 0;
    require(ok, ExitCode::environment, "no memory for the reports of ranks: ", system_message(errno));
  }

 private:
  ssize_t bytes() const { return static_cast<ssize_t>(numbers_.size() * sizeof(int64_t)); }

  int fd_, workers_;
  std::vector<int64_t> numbers_;
};

// Returns the first that reports a rank as its cause; null if none does. A rank that the launcher ended counts if another left because of
// it by itself.
const Ending* reporter_of(const std::vector<Ending>& failures, const Reports& reports, int first_rank, const Ending& ending) {
  const auto reports_it = [&](const Ending& other) {
    return reports.cause(other.rank - first_rank) == ending.rank && !(ending.sent && other.sent);
  };
  const auto found = std::find_if(failures.begin(), failures.end(), reports_it);
  return found == failures.end() ? nullptr : &*found;
}

// Moves the failure that came first to the front. It reports no other rank and is, in this order: one that others report and that did not
// leave for a lost peer or a stop; the first by time that neither left so nor was ended because of another; one that others report. If
// there is none, it is the first of all.
void put_cause_first(std::vector<Ending>& failures, const Reports& reports, int first_rank) {
  const auto order = [&](const Ending& ending) {  // the lowest comes first
    if (reports.cause(ending.rank - first_rank) >= 0) return 3;
    const bool left = ending.code == static_cast<int>(ExitCode::peer_lost) || ending.code == static_cast<int>(ExitCode::stopped);
    const bool reported = reporter_of(failures, reports, first_rank, ending) != nullptr;
    return left ? (reported ? 2 : 3) : reported ? 0 : ending.sent ? 3 : 1;
  };
  const auto by_order = [&](const Ending& a, const Ending& b) { return order(a) < order(b); };
  const auto first = std::min_element(failures.begin(), failures.end(), by_order);
  std::rotate(failures.begin(), first, first + 1);
  // If the launcher ended it before it had ended by itself, it gets the code of those that left because of it.
  Ending& front = failures.front();
  const Ending* const reported = reporter_of(failures, reports, first_rank, front);
  if (front.sent && reported != nullptr) front.code = reported->code, front.signal = reported->signal;
}

void check(const LaunchArguments& arguments) {
  require(arguments.nodes >= 1 && arguments.nodes <= kMostRanks, ExitCode::usage, "--nnodes: must be 1 to ", kMostRanks, ", got ",
          arguments.nodes);
  require(arguments.node_rank >= 0 && arguments.node_rank < arguments.nodes, ExitCode::usage,
          "--node-rank: must be below --nnodes=", arguments.nodes, ", got ", arguments.node_rank);
  require(arguments.max_restarts >= 0, ExitCode::usage, "--max-restarts: must not be negative, got ", arguments.max_restarts);
  const int64_t port = arguments.port.value_or(kDefaultPort);
  require(port >= 1 && port <= 65535, ExitCode::usage, "--master-port: must be 1 to 65535, got ", port);
  require(arguments.nodes == 1 || arguments.address, ExitCode::usage, "--nnodes=", arguments.nodes,
          " needs --master-addr, the host of rank 0");
  require(!arguments.standalone || (arguments.nodes == 1 && !arguments.port && !arguments.address), ExitCode::usage,
          "--standalone uses a free port of this host; leave out --nnodes, --master-addr and --master-port");
  require(!arguments.tee || (*arguments.tee >= 0 && *arguments.tee <= 3), ExitCode::usage, "--tee: must be 0 to 3, got ",
          arguments.tee.value_or(0));
  require(!arguments.tee || arguments.log_folder, ExitCode::usage, "--tee needs --log-dir, because it chooses what is shown beside a log");
}

WorkerPlan plan_of(const LaunchArguments& arguments) {
  check(arguments);
  WorkerPlan plan;
  plan.workers = worker_count(arguments.workers);
  require(int64_t{plan.workers} * arguments.nodes <= kMostRanks, ExitCode::usage, "--nnodes times --nproc-per-node: more than ", kMostRanks,
          " ranks");
  plan.world = plan.workers * arguments.nodes;
  plan.first_rank = plan.workers * arguments.node_rank;
  plan.node = arguments.node_rank;
  plan.nodes = arguments.nodes;
  plan.master_address = arguments.address.value_or("127.0.0.1");
  plan.master_port = static_cast<int>(arguments.port.value_or(kDefaultPort));
  plan.most_restarts = arguments.max_restarts;
  plan.log_folder = arguments.log_folder.value_or("");
  plan.shown = static_cast<int>(arguments.tee.value_or(3));
  if (arguments.ranks) plan.shown_ranks = ranks_in(*arguments.ranks, plan.world);
  const Environment environment = process_environment();
  const bool secret_is_given = environment.contains("MANTISSA_SECRET") || environment.contains("MANTISSA_SECRET_FILE");
  if (plan.nodes == 1 && !secret_is_given) plan.secret = new_secret();
  plan.command = arguments.command;
  plan.trains = plan.command.front() == "train";
  if (std::ranges::count(arguments.subcommands, plan.command.front()) > 0)  // this binary runs its own
    plan.command.insert(plan.command.begin(), std::filesystem::read_symlink("/proc/self/exe").string());
  return plan;
}

std::string cause_text(const Ending& ending) {
  if (ending.signal == 0) return text("exit code ", ending.code);
  const char* const name = ::sigabbrev_np(ending.signal);
  return name != nullptr ? text("SIG", name) : text("signal ", ending.signal);
}

void say(const std::string& message) { UnblockedOutput(STDERR_FILENO).write(text("mantissa launch: ", printable(message, "\n  "), '\n')); }

// Failures after the first mostly follow from it.
void print_causes(const Attempt& attempt) {
  const Ending& first = attempt.failures.front();
  const bool logged = !first.log.empty();
  std::string lines = text("rank ", first.rank, " failed first: ", cause_text(first));
  if (!attempt.repeated.empty()) {
    const std::vector<int> ranks(attempt.repeated.begin(), attempt.repeated.end());
    lines += text("; ", ranks.size() == 1 ? "rank " : "ranks ", joined(ranks, ", "), " reported an error above, too");
  }
  const auto add = [&](const std::string& rank, const std::string& host, const std::string& pid, const std::string& seconds,
                       const std::string& ended, const std::string& log) {
    std::array<char, 160> row{};
    std::snprintf(row.data(), row.size(), "\n%6s  %-16.40s  %8s  %8s  %-*s", rank.c_str(), host.c_str(), pid.c_str(), seconds.c_str(),
                  logged ? 13 : 0, ended.c_str());
    lines += row.data() + (logged ? "  " + log : "");
  };
  add("rank", "host", "pid", "seconds", "ended by", "log");
  for (const Ending& failure : attempt.failures) {
    std::array<char, 32> seconds{};
    std::snprintf(seconds.data(), seconds.size(), "%.3f", failure.seconds);
    add(std::to_string(failure.rank), host_name(), std::to_string(failure.pid), seconds.data(), cause_text(failure), failure.log);
  }
  say(lines);
}

// Restarts after a lost peer, a bug, or a death, unless somebody asked for an end; SIGUSR2 alone does not ask for one.
bool worth_a_restart(const Attempt& attempt) {
  const Ending& first = attempt.failures.front();
  if (std::any_of(attempt.forwarded.begin(), attempt.forwarded.end(), [](int signal) { return signal != SIGUSR2; })) return false;
  if (first.signal != 0) return !attempt.forwarded.contains(first.signal);
  return first.code == static_cast<int>(ExitCode::peer_lost) || first.code == static_cast<int>(ExitCode::internal);
}

// Counts attempts in a row that ended for want of memory: by the kernel's out-of-memory killer, or, if it does not say whom it killed, or
// says it in another group, by a SIGKILL before a new step. One may be due to what ran beside it; the next would end the same way.
class MemoryDeaths {
 public:
  void begin_attempt() { before_ = out_of_memory_kills(); }
  void end_attempt(const Ending& first, bool stepped) {
    const std::optional<int64_t> kills = out_of_memory_kills();
    const bool more = kills && before_ && *kills > *before_;
    reported_ = more || (kills && before_ && first.counted);
    const bool died = first.code == 128 + SIGKILL && (reported_ ? more : !stepped);
    in_a_row_ = died ? in_a_row_ + 1 : 0;
    if (died && reported_) say("the kernel's out-of-memory killer killed a rank");
  }
  bool repeated() const { return in_a_row_ > 1; }
  std::string why() const {
    return reported_ ? "the kernel killed two attempts in a row because memory ran out"
                     : "two attempts in a row were killed before a new step, perhaps because memory ran out";
  }

 private:
  std::optional<int64_t> before_;
  bool reported_ = false;
  int in_a_row_ = 0;
};

// Returns whether this launcher was asked to stop, or all of them were: nothing failed.
bool was_stopped(const Attempt& attempt) {
  const auto stopped = [](const Ending& ending) { return ending.code == static_cast<int>(ExitCode::stopped); };
  return stopped(attempt.failures.front()) &&
         (!attempt.forwarded.empty() || std::all_of(attempt.failures.begin(), attempt.failures.end(), stopped));
}

ExitCode launch(const LaunchArguments& arguments) {
  WorkerPlan plan = plan_of(arguments);
  std::unique_ptr<ReservedPort> reserved;
  if (plan.nodes == 1 && !arguments.port) {
    reserved = std::make_unique<ReservedPort>();
    plan.master_port = reserved->port();
  }
  plan.run_id = plan.nodes == 1 ? text("mantissa-", ::getpid(), "-", plan.master_port) : "mantissa";
  Reports reports(plan.workers);
  plan.step_fd = reports.fd();
  SignalQueue signals;
  MemoryDeaths deaths;
  int64_t highest = 0;
  for (int without_step = 0;; ++plan.restart) {
    deaths.begin_attempt();
    Attempt attempt = run_workers(plan, signals);
    if (attempt.killed) return static_cast<ExitCode>(128 + SIGINT);
    for (const std::string& loss : attempt.losses) say(loss);
    if (attempt.failures.empty()) return ExitCode::ok;
    reports.read();
    put_cause_first(attempt.failures, reports, plan.first_rank);
    const Ending& first = attempt.failures.front();
    if (!was_stopped(attempt)) print_causes(attempt);
    const int64_t step = reports.highest_step();
    deaths.end_attempt(first, step > highest);
    if (plan.restart > 0) without_step = step > highest ? 0 : without_step + 1;
    highest = std::max(highest, step);
    reports.clear();
    if (plan.restart >= plan.most_restarts || !worth_a_restart(attempt)) return static_cast<ExitCode>(first.code);
    if (without_step >= kMostRestartsWithoutStep || deaths.repeated()) {
      say("no restart: " + (deaths.repeated() ? deaths.why() : text(without_step, " restarts in a row did not get beyond step ", highest)));
      return static_cast<ExitCode>(first.code);
    }
    const std::vector<int> waiting = signals.take();
    if (std::any_of(waiting.begin(), waiting.end(), [](int signal) { return signal != SIGCHLD; })) return static_cast<ExitCode>(first.code);
    say(text("restart ", plan.restart + 1, " of ", plan.most_restarts));
  }
}

}  // namespace

Command launch_command(std::vector<std::string> subcommands) {
  const auto a = std::make_shared<LaunchArguments>();
  a->subcommands = std::move(subcommands);
  return {
      .name = "launch",
      .summary = "run a command once per rank on this node",
      .example =
          "mantissa launch --nproc-per-node 2 train configs/quickstart.json --set logging.run_name=ranks\n"
          "mantissa launch --nproc-per-node 2 --max-restarts 3 train configs/quickstart.json --set logging.run_name=safe",
      .options =
          {{"--nproc-per-node,--nproc_per_node", &a->workers, "ranks on this node: a number; gpu: its GPUs; cpu or auto: its cores"},
           {"--nnodes", &a->nodes, "nodes; this command runs on each of them"},
           {"--node-rank,--node_rank", &a->node_rank, "index of this node, from 0"},
           {"--master-addr,--master_addr", &a->address, "host of rank 0 (127.0.0.1)"},
           {"--master-port,--master_port", &a->port, "port of rank 0 (one node: a free one; else 29500)"},
           {"--standalone", &a->standalone, "one node, a free port"},
           {.name = "--max-restarts,--max_restarts",
            .target = &a->max_restarts,
            .description =
                "how often all ranks are restarted after exit codes 6 and 70 and deaths by a signal; no more after three restarts without "
                "a new step, or two deaths in a row by lack of memory"},
           {"--log-dir,--log_dir", &a->log_folder, "also write DIR/attempt_N/RANK/stdout.log and stderr.log"},
           {"--tee", &a->tee, "with --log-dir, what is also shown: 0 nothing, 1 standard output, 2 standard error, 3 both (3)"},
           {"--ranks-filter,--ranks_filter", &a->ranks, "ranks whose output is shown, as in 0,3 (all)"},
           {"COMMAND", &a->command, "all words from here on, or after a --; this binary runs subcommands of mantissa itself"}},
      .run = [a] { return launch(*a); },
      .runs_command = true,
      .many_ranks = true};  // srun may start one on each node
}

}  // namespace mantissa::tools
