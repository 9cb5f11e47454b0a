// mantissa launch as a process, with small shell commands as its workers.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "process.h"

namespace mantissa::test {

using Clock = std::chrono::steady_clock;

// Generous: the machine may be busy.
inline bool eventually(const std::function<bool()>& is_so, double seconds = 60) {
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    if (is_so()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

class LaunchTest : public ::testing::Test {
 protected:
  // With an environment that no launcher of this test's own can reach into.
  ProcessResult launch(std::vector<std::string> options, const std::string& script) const {
    options.insert(options.end(), {"--", "sh", "-c", script});
    return mantissa(std::move(options));
  }
  ProcessResult mantissa(std::vector<std::string> options) const {
    std::vector<std::string> words = {"env",           "-u",    "MANTISSA_SECRET", "-u", "MANTISSA_SECRET_FILE", "-u", "OMP_NUM_THREADS",
                                      MANTISSA_BINARY, "launch"};
    words.insert(words.end(), options.begin(), options.end());
    return run_process(words, folder_.path());
  }

  // Does something to a running launcher once `script` has written the file "ready.R" for every rank R.
  ProcessResult disturbed(int ranks, const std::string& script, const std::function<void(pid_t)>& disturb, int most_restarts = 0) const {
    ProcessResult result;
    std::filesystem::remove(folder_ / "launcher");
    for (int rank = 0; rank < ranks; ++rank) std::filesystem::remove(folder_ / ("ready." + std::to_string(rank)));
    // exec: the number in "launcher" is the launcher's.
    std::thread runner([&] {
      result = run_process({"sh", "-c", "echo $$ > launcher; exec \"$@\"", "sh", MANTISSA_BINARY, "launch", "--nproc-per-node",
                            std::to_string(ranks), "--max-restarts", std::to_string(most_restarts), "--", "sh", "-c", script},
                           folder_.path());
    });
    bool all = eventually([&] {
      for (int rank = 0; rank < ranks; ++rank) {
        if (!std::filesystem::exists(folder_ / ("ready." + std::to_string(rank)))) return false;
      }
      return true;
    });
    EXPECT_TRUE(all);
    disturb(std::stoi(read_file(folder_ / "launcher")));
    runner.join();
    return result;
  }

  TemporaryFolder folder_;
};

}  // namespace mantissa::test
