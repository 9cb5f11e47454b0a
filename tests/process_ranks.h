// Ranks as processes of the test, over UCX. The test itself starts no thread before it forks.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "files.h"
#include "mantissa/comm/communicator.h"

namespace mantissa::test {

inline int64_t monotonic_microseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class ProcessRanks {
 public:
  // State that all processes see.
  struct Shared {
    std::atomic<bool> lost{false};         // ends the waits of all ranks
    std::atomic<int64_t> left_at[8] = {};  // when a rank's body ended, in microseconds
    std::atomic<int> ready{0};             // for bodies to count in
  };

  ProcessRanks() {
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "no shared memory");
    shared_ = new (memory) Shared;
  }
  ~ProcessRanks() {
    for (const pid_t child : children_) {
      if (child > 0 && ::kill(child, SIGKILL) == 0) ::waitpid(child, nullptr, 0);
    }
    ::munmap(shared_, sizeof(Shared));
  }
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  Shared& shared() const { return *shared_; }
  pid_t pid(int rank) const { return children_[static_cast<size_t>(rank)]; }

  // Starts one process a rank, with UCX_TLS set if `transports` is not empty. Each ends with the code of what body throws.
  void start(int ranks, const std::string& transports, const std::function<void(const Communicator&)>& body) {
    start_below(ranks, transports, [body](std::unique_ptr<Transport> transport) { body(Communicator(std::move(transport))); });
  }
  void start_below(int ranks, const std::string& transports, const std::function<void(std::unique_ptr<Transport>)>& body) {
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) ::_exit(run(rank, ranks, transports, body));
      children_.push_back(child);
    }
  }

  // Exit code (128 + signal) and message of a rank.
  std::string end(int rank) {
    pid_t& child = children_[static_cast<size_t>(rank)];
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    child = 0;
    const std::string path = error_path(rank);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code == 0 ? "" : text(code, ": ", std::filesystem::exists(path) ? read_file(path) : "");
  }

  std::vector<std::string> ends() {
    std::vector<std::string> out;
    for (size_t rank = 0; rank < children_.size(); ++rank) out.push_back(end(static_cast<int>(rank)));
    return out;
  }

 private:
  std::string error_path(int rank) const { return folder_ / text("error", rank); }

  std::vector<std::string> exchange(int rank, int ranks, const std::string& own) const {
    write_file(folder_ / text("new", rank), own);
    std::filesystem::rename(folder_ / text("new", rank), folder_ / text("address", rank));
    std::vector<std::string> out;
    for (int r = 0; r < ranks; ++r) {
      while (!std::filesystem::exists(folder_ / text("address", r))) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      out.push_back(read_file(folder_ / text("address", r)));
    }
    return out;
  }

  int run(int rank, int ranks, const std::string& transports, const std::function<void(std::unique_ptr<Transport>)>& body) const {
    int code = 0;
    if (!transports.empty()) ::setenv("UCX_TLS", transports.c_str(), 1);
    try {
      const auto others = [&](const std::string& own) { return exchange(rank, ranks, own); };
      const auto interrupt = [&] { require(!shared_->lost, ExitCode::peer_lost, "a peer was lost"); };
      body(ucx_transport(rank, others, interrupt));
    } catch (const Error& error) {
      write_file(error_path(rank), error.what());
      code = static_cast<int>(error.code());
    }
    shared_->left_at[rank] = monotonic_microseconds();
    return code;
  }

  TemporaryFolder folder_;
  Shared* shared_;
  std::vector<pid_t> children_;
};

}  // namespace mantissa::test
