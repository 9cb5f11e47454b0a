// `mantissa train` on several ranks of this host as children of the test, which plays mpirun: nobody ends ranks or says what became of
// them.
#pragma once

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "files.h"

namespace mantissa::test {

class RankProcesses {
 public:
  // Rank r runs words(r) in `folder`, its output in the files out.r and err.r there.
  RankProcesses(int ranks, const std::filesystem::path& folder, const std::function<std::vector<std::string>(int)>& words)
      : folder_(folder), children_(static_cast<size_t>(ranks)) {
    static int jobs = 0;
    const std::string job = text(::getpid(), "-", jobs++);
    for (int rank = 0; rank < ranks; ++rank) {
      Child& child = children_[static_cast<size_t>(rank)];
      child.pid = ::fork();
      if (child.pid == 0) become(rank, ranks, job, words(rank));
    }
  }
  ~RankProcesses() {
    for (size_t rank = 0; rank < children_.size(); ++rank) {
      if (!children_[rank].ended) send(static_cast<int>(rank), SIGKILL);
    }
    wait_for_all(60);
  }
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  pid_t pid(int rank) const { return of(rank).pid; }
  void send(int rank, int signal) const { ::kill(pid(rank), signal); }

  // False if some of these ranks (of all, if none are named) still run after `seconds`.
  bool wait_for(std::vector<int> ranks, double seconds) {
    const double end = now() + seconds;
    while (true) {
      std::erase_if(ranks, [&](int rank) { return look(rank); });
      if (ranks.empty() || now() > end) return ranks.empty();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  bool wait_for_all(double seconds) {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < children_.size(); ++rank) ranks.push_back(static_cast<int>(rank));
    return wait_for(ranks, seconds);
  }
  bool ended(int rank) { return look(rank); }
  int code(int rank) const { return of(rank).code; }             // 128 + n when signal n ended it, -1 while it runs
  double ended_at(int rank) const { return of(rank).ended_at; }  // as now()
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
    child = {.pid = child.pid, .ended = true, .code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), .ended_at = now()};
    return true;
  }

  [[noreturn]] void become(int rank, int ranks, const std::string& job, std::vector<std::string> words) const {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const std::array<std::pair<const char*, std::string>, 5> variables = {{{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
                                                                           {"OMPI_COMM_WORLD_SIZE", std::to_string(ranks)},
                                                                           {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
                                                                           {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(ranks)},
                                                                           {"PMIX_NAMESPACE", job}}};
    for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
    const std::string out = (folder_ / text("out.", rank)).string(), err = (folder_ / text("err.", rank)).string();
    const bool ready = ::chdir(folder_.c_str()) == 0 && std::freopen("/dev/null", "r", stdin) != nullptr &&
                       std::freopen(out.c_str(), "w", stdout) != nullptr && std::freopen(err.c_str(), "w", stderr) != nullptr;
    if (!ready) ::_exit(126);
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    ::execvp(arguments[0], arguments.data());
    ::_exit(127);
  }

  std::filesystem::path folder_;
  std::vector<Child> children_;
};

}  // namespace mantissa::test
