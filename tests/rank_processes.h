// `mantissa train` on several ranks of this host as children of the test, which plays mpirun: nobody ends ranks or says what became of
// them.
#pragma once

#include <array>
#include <atomic>

#include "process.h"

namespace mantissa::test {

class RankProcesses {
 public:
  // Rank r runs words(r) in `folder`, its output in the files out.r and err.r there.
  RankProcesses(int ranks, const std::filesystem::path& folder, const std::function<std::vector<std::string>(int)>& words)
      : folder_(folder), children_(static_cast<size_t>(ranks)) {
    static std::atomic<int> jobs{0};
    const std::string job = text(::getpid(), "-", jobs++);
    for (int rank = 0; rank < ranks; ++rank) {
      Child& child = children_[static_cast<size_t>(rank)];
      std::vector<std::string> own = words(rank);
      const std::vector<char*> arguments = pointers(own);
      for (const char* const file : {"out.", "err."}) write_file((folder_ / text(file, rank)).string(), "");
      child.pid = ::fork();
      if (child.pid != 0) continue;
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      name_rank(rank, ranks, job);
      become(arguments, folder_, folder_ / text("out.", rank), folder_ / text("err.", rank));
    }
  }
  ~RankProcesses() {
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      if (!children_[rank].ended) send(static_cast<int>(rank), SIGKILL);
    }
    wait_for_all();
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  pid_t pid(int rank) const { return of(rank).pid; }
  void send(int rank, int signal) const { ::kill(pid(rank), signal); }

  // Waits. Returns false if some of these ranks (of all, if none are named) still run after `seconds`.
  bool wait_for(std::vector<int> ranks, double seconds = kHangSeconds) {
    const double end = now() + seconds;
    while (true) {
      std::erase_if(ranks, [&](int rank) { return look(rank); });
      if (ranks.empty() || now() > end) return ranks.empty();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  bool wait_for_all() {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < children_.size(); ++rank) ranks.push_back(static_cast<int>(rank));
    return wait_for(ranks);
  }
  bool ended(int rank) { return look(rank); }
  int code(int rank) const { return of(rank).code; }             // 128 + n when signal n ended it, -1 while it runs
  double ended_at(int rank) const { return of(rank).ended_at; }  // by the clock of now()
  std::string output(int rank) const { return read_file((folder_ / text("out.", rank)).string()); }
  std::string errors(int rank) const { return read_file((folder_ / text("err.", rank)).string()); }

  static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

 private:
  struct Child {
    pid_t pid = -1;
    bool ended = false;
    int code = -1;
    double ended_at = 0;
  };
  const Child& of(int rank) const { return children_[static_cast<size_t>(rank)]; }

  bool look(int rank) {
    Child& child = children_[static_cast<size_t>(rank)];
    int status = 0;
    if (child.ended || ::waitpid(child.pid, &status, WNOHANG) != child.pid) return child.ended;
    child = {.pid = child.pid, .ended = true, .code = exit_code(status), .ended_at = now()};
    return true;
  }

  static void name_rank(int rank, int ranks, const std::string& job) {
    const std::array<std::pair<const char*, std::string>, 5> variables = {{{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                                                                           {"OMPI_COMM_WORLD_SIZE", std::to_string(ranks)},
                                                                           {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
                                                                           {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(ranks)},
                                                                           {"PMIX_NAMESPACE", job}}};
    for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
  }

  std::filesystem::path folder_;
  std::vector<Child> children_;
};

}  // namespace mantissa::test
