#include "job/launch.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <ctime>
#include <numeric>
#include <optional>
#include <system_error>

namespace mantissa {
namespace {

constexpr int kLastPort = 65535;
constexpr const char *kOwnLauncher = "mantissa launch", *kTorchrun = "torchrun";
constexpr std::string_view kReports = "MANTISSA_STEP_FD";  // set by the own launcher

std::optional<int64_t> whole_number(std::string_view digits) {
  int64_t value = 0;
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (problem != std::errc{} || end != digits.data() + digits.size()) return {};
  return value;
}

class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  bool has(std::string_view name) const { return environment_.contains(name); }

  std::string text_of(std::string_view name) const {
    const auto found = environment_.find(name);
    require(found != environment_.end(), ExitCode::usage, name, ": is not set");
    require(!found->second.empty(), ExitCode::usage, name, ": is empty");
    return found->second;
  }

  int number(std::string_view name, int least, int most) const {
    const std::string value = text_of(name);
    const std::optional<int64_t> number = whole_number(value);
    require(number && *number >= least && *number <= most, ExitCode::usage, name, ": must be a whole number from ", least, " to ", most,
            ", got '", value, "'");
    return static_cast<int>(*number);
  }

  // Requires both or neither.
  bool has_pair(std::string_view a, std::string_view b) const {
    require(has(a) == has(b), ExitCode::usage, has(a) ? a : b, "=", environment_.find(has(a) ? a : b)->second, " is set, and ",
            has(a) ? b : a, " is not");
    return has(a);
  }

 private:
  const Environment& environment_;
};

// Names the variables of a launcher for the same four numbers.
struct Names {
  std::string_view rank, world, local_rank, local_size;
};

Launch ranks_by(const Variables& variables, const Names& names, const std::string& launcher) {
  Launch launch;
  launch.launcher = launcher;
  launch.world = variables.number(names.world, 1, kMostRanks);
  launch.rank = variables.number(names.rank, 0, kMostRanks);
  require(launch.rank < launch.world, ExitCode::usage, names.rank, "=", launch.rank, ": must be below ", names.world, "=", launch.world);
  if (variables.has_pair(names.local_rank, names.local_size)) {
    launch.local_size = variables.number(names.local_size, 1, kMostRanks);
    launch.local_rank = variables.number(names.local_rank, 0, kMostRanks);
    require(launch.local_size <= launch.world, ExitCode::usage, names.local_size, "=", launch.local_size, ": more than ", names.world, "=",
            launch.world);
    require(launch.local_rank < launch.local_size, ExitCode::usage, names.local_rank, "=", launch.local_rank, ": must be below ",
            names.local_size, "=", launch.local_size);
  }
  return launch;
}

// Returns true if MASTER_ADDR and MASTER_PORT give the address.
bool meet_at_master(const Variables& variables, Launch& launch) {
  if (!variables.has_pair("MASTER_ADDR", "MASTER_PORT")) return false;
  launch.address = variables.text_of("MASTER_ADDR");
  launch.port = variables.number("MASTER_PORT", 1, kLastPort);
  return true;
}

Launch by_torchrun(const Variables& variables) {
  const std::string launcher = variables.has(kReports) ? kOwnLauncher : kTorchrun;
  Launch launch = ranks_by(variables, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, launcher + " (RANK, WORLD_SIZE)");
  launch.in_order = true;
  if (variables.has("TORCHELASTIC_RESTART_COUNT")) launch.restart = variables.number("TORCHELASTIC_RESTART_COUNT", 0, 1 << 20);
  if (variables.has("TORCHELASTIC_RUN_ID")) launch.job = variables.text_of("TORCHELASTIC_RUN_ID");
  if (launch.world == 1) return launch;
  require(meet_at_master(variables, launch), ExitCode::usage, "WORLD_SIZE=", launch.world, ": MASTER_ADDR and MASTER_PORT are not set");
  if (variables.has("TORCHELASTIC_USE_AGENT_STORE") && variables.text_of("TORCHELASTIC_USE_AGENT_STORE") == "True") {
    require(launch.port < kLastPort, ExitCode::usage, "MASTER_PORT=", launch.port,
            ": torchrun listens there, and there is no port after it");
    ++launch.port;
  }
  return launch;
}

// Handles launchers that give no address: on one host rank 0 chooses one, published under the name of the job or, without a name, of the
// parent of its ranks, which ranks of another host do not share.
Launch by_mpi(const Variables& variables, const Names& names, const std::string& launcher, const std::string& job, int64_t parent) {
  Launch launch = ranks_by(variables, names, launcher);
  launch.job = job;
  if (launch.world == 1 || meet_at_master(variables, launch)) return launch;
  require(launch.local_size == launch.world, ExitCode::usage, launcher, " started ", launch.world, " ranks on several hosts (",
          names.local_size, "=", launch.local_size, "): say where rank 0 listens with -x MASTER_ADDR=HOST -x MASTER_PORT=PORT");
  if (job.empty()) launch.job = text("parent-", parent);
  return launch;
}

Launch by_slurm(const Variables& variables) {
  const std::string_view size = variables.has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  Launch launch = ranks_by(variables, {"SLURM_PROCID", size, "", ""}, "Slurm");
  const int job = variables.number("SLURM_JOB_ID", 0, INT32_MAX);
  launch.job = text("slurm-", job, "-", variables.text_of("SLURM_STEP_ID"));
  if (variables.has("SLURM_RESTART_COUNT")) launch.restart = variables.number("SLURM_RESTART_COUNT", 0, 1 << 20);
  if (launch.world == 1) return launch;
  const std::string_view name = "SLURM_STEP_TASKS_PER_NODE";  // srun gives no local size; a list has the number of tasks of this node
  const std::vector<int> tasks = tasks_per_node(name, variables.text_of(name));
  const auto node = static_cast<size_t>(tasks.size() == 1 ? 0 : variables.number("SLURM_NODEID", 0, static_cast<int>(tasks.size()) - 1));
  require(std::accumulate(tasks.begin(), tasks.end(), int64_t{0}) == launch.world, ExitCode::usage, name, "=", variables.text_of(name),
          ": does not sum to the ", launch.world, " tasks of the step");
  launch.local_size = tasks[node];
  launch.local_rank = variables.number("SLURM_LOCALID", 0, launch.local_size - 1);
  if (meet_at_master(variables, launch) || launch.local_size == launch.world) return launch;
  const std::string_view hosts = variables.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
  launch.address = first_host(hosts, variables.text_of(hosts));
  launch.port = 10000 + job % 20000;
  return launch;
}

Launch launch_by(const Variables& variables, int64_t parent) {
  const bool slurm_step = variables.has("SLURM_PROCID") && variables.has("SLURM_STEP_ID");
  if (variables.has_pair("RANK", "WORLD_SIZE")) return by_torchrun(variables);
  if (variables.has_pair("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")) {
    const bool named = variables.has("PMIX_NAMESPACE");
    return by_mpi(variables, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
                  "Open MPI", named ? text("openmpi-", variables.text_of("PMIX_NAMESPACE")) : "", parent);
  }
  // srun sets these two as well where its plugin is PMI2, but not the local ones of Hydra, whose ranks on a host have one parent.
  if (variables.has_pair("PMI_RANK", "PMI_SIZE") && (variables.has("MPI_LOCALRANKID") || !slurm_step))
    return by_mpi(variables, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, "MPICH", "", parent);
  return slurm_step ? by_slurm(variables) : Launch{};
}

}  // namespace

int64_t parent_process() { return ::getppid(); }

Environment process_environment() {
  Environment out;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view line = *entry;
    const size_t equals = line.find('=');
    if (equals != std::string_view::npos) out.emplace(line.substr(0, equals), line.substr(equals + 1));
  }
  return out;
}

Launch launch_from_environment(const Environment& environment, int64_t parent) {
  Launch launch = launch_by(Variables(environment), parent);
  const bool on_loopback = launch.address == "localhost" || launch.address == "::1" || launch.address.starts_with("127.");
  if (launch.world > 1 && launch.local_size == 1 && on_loopback) {  // a launcher that names no local ranks, and where they must be
    launch.local_rank = launch.rank;
    launch.local_size = launch.world;
  }
  return launch;
}

std::string describe(const Launch& launch) {
  if (launch.world == 1) return text("one rank, started by ", launch.launcher);
  const std::string place = launch.port == 0 ? "on this host" : text("at ", launch.address, ":", launch.port);
  return text("rank ", launch.rank, " of ", launch.world, " (", launch.local_rank, " of ", launch.local_size, " on this host), started by ",
              launch.launcher, ", rendezvous ", place, launch.restart > 0 ? text(", restart ", launch.restart) : "");
}

int threads_of_rank(const Launch& launch, int usable_cores, int online_cores) {
  return std::max(1, std::min(usable_cores, online_cores / launch.local_size));
}

namespace {

// Returns the file of the launcher, or nothing.
std::optional<int> reports() {
  const Environment environment = process_environment();
  const Variables variables(environment);
  if (!variables.has(kReports)) return {};
  const int fd = variables.number(kReports, 3, 1 << 20);
  std::error_code unknown;
  const std::string name = std::filesystem::read_symlink(text("/proc/self/fd/", fd), unknown).string();
  return name == text("/memfd:", kReportsName, " (deleted)") ? std::optional(fd) : std::nullopt;
}

// Returns where this rank writes number `index` of those that the launcher keeps for every rank of the node; nothing without a launcher.
std::optional<std::pair<int, off_t>> report_place(int index) {
  const std::optional<int> fd = reports();
  if (!fd) return {};
  const Environment environment = process_environment();
  const Variables variables(environment);
  const int local = variables.number("LOCAL_RANK", 0, kMostRanks), ranks = variables.number("LOCAL_WORLD_SIZE", 1, kMostRanks);
  return std::pair(*fd, (off_t{index} * ranks + local) * static_cast<off_t>(sizeof(int64_t)));
}

}  // namespace

void report_step(int64_t step) {
  static const std::optional<std::pair<int, off_t>> place = report_place(0);
  // A lost report costs at most one restart.
  if (place && ::pwrite(place->first, &step, sizeof step, place->second) != sizeof step) return;
}

void report_cause(int rank) {
  const std::optional<std::pair<int, off_t>> place = report_place(1);
  const int64_t number = int64_t{rank} + 1;
  // A lost report costs a name in a message.
  if (place && ::pwrite(place->first, &number, sizeof number, place->second) != sizeof number) return;
}

bool has_launcher() { return reports().has_value(); }

bool outlive_launcher() {
  const std::optional<int> fd = reports();
  if (!fd) return false;
  struct flock shared {};
  shared.l_type = F_RDLCK;  // all ranks of the node can have it, once nobody holds that of a writer
  int problem = 0;
  do {
    problem = ::fcntl(*fd, F_SETLKW, &shared) == 0 ? 0 : errno;
  } while (problem == EINTR);
  return problem == 0;
}

std::string first_host(std::string_view variable, std::string_view list) {
  const auto refuse = [&] { fail(ExitCode::usage, variable, "=", list, ": is not a list of hosts"); };
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ',';) {
    if (list[i] == '[') {  // its first number, the width of which counts
      const size_t close = list.find(']', i), end = std::min(close, list.find_first_of(",-", i));
      if (close == std::string_view::npos || !whole_number(list.substr(i + 1, end - i - 1)) || list[i + 1] == '-') refuse();
      host += list.substr(i + 1, end - i - 1);
      i = close + 1;
    } else {
      const bool plain = (list[i] >= '0' && list[i] <= '9') || ((list[i] | 0x20) >= 'a' && (list[i] | 0x20) <= 'z') || list[i] == '-' ||
                         list[i] == '.' || list[i] == '_';
      if (!plain) refuse();
      host += list[i++];
    }
  }
  if (host.empty() || host.size() > 255) refuse();
  return host;
}

std::vector<int> tasks_per_node(std::string_view variable, std::string_view list) {
  const auto refuse = [&] {
    fail(ExitCode::usage, variable, "=", list, ": must be a list such as 4(x2),2 of at most ", kMostRanks, " nodes");
  };
  const auto count = [&](std::string_view digits) {
    const std::optional<int64_t> number = whole_number(digits);
    if (!number || *number < 1 || *number > kMostRanks) refuse();
    return static_cast<int>(*number);
  };
  std::vector<int> out;
  for (std::string_view rest = list; !rest.empty() || out.empty();) {
    const size_t comma = rest.find(',');
    std::string_view entry = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    if (comma != std::string_view::npos && rest.empty()) refuse();
    int times = 1;
    if (const size_t open = entry.find("(x"); open != std::string_view::npos && entry.ends_with(')')) {
      times = count(entry.substr(open + 2, entry.size() - open - 3));
      entry = entry.substr(0, open);
    }
    if (out.size() + static_cast<size_t>(times) > static_cast<size_t>(kMostRanks)) refuse();
    out.insert(out.end(), static_cast<size_t>(times), count(entry));
  }
  return out;
}

namespace {

namespace fs = std::filesystem;

// Returns the bytes that the segment had; nothing if it was left alone. Other users may have placed traps, so no link is followed and
// opening never waits for the other end of a pipe.
std::optional<int64_t> remove_if_orphaned(const fs::path& file) {
  const int fd = ::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0) return {};
  constexpr time_t kEmptySeconds = 60;  // for which an empty one is left alone
  struct stat status {};
  const bool is_ours = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == ::geteuid();
  const bool may_be_new = status.st_size == 0 && ::time(nullptr) - status.st_mtime < kEmptySeconds;
  // Opening a file breaks the lease of its holder by a signal, SIGIO by default, which would end this process.
  const bool orphaned = is_ours && !may_be_new && ::fcntl(fd, F_SETSIG, SIGURG) == 0 && ::fcntl(fd, F_SETLEASE, F_WRLCK) == 0;
  const bool removed = orphaned && ::unlink(file.c_str()) == 0;
  ::close(fd);
  return removed ? std::optional<int64_t>(status.st_size) : std::nullopt;
}

}  // namespace

OrphanedSegments remove_orphaned_segments(const fs::path& folder) {
  OrphanedSegments out;
  std::error_code unreadable;
  for (fs::directory_iterator entry(folder, unreadable), end; !unreadable && entry != end; entry.increment(unreadable)) {
    if (!entry->path().filename().string().starts_with("ucx_shm_posix_")) continue;
    const std::optional<int64_t> bytes = remove_if_orphaned(entry->path());
    if (!bytes) continue;
    ++out.count;
    out.bytes += *bytes;
  }
  return out;
}

}  // namespace mantissa
