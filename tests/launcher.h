// mantissa launch as a process, with small shell commands as its workers.
#pragma once

#include <gmock/gmock.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "process.h"

namespace mantissa::test {

// Requirements on `launch OPTIONS -- sh -c SCRIPT`.
struct Launched {
  std::string script;
  int code = 0;
  std::vector<std::string> output = {};  // parts of standard output
  std::vector<std::string> errors = {};  // regular expressions of standard error
  std::string without = {};              // text that standard error must not have
  std::vector<std::string> options = {"--nproc-per-node", "2"};
  int signal = 0;  // for the launcher, once all of its ranks, two if nothing else is said, have written the file ready.R
  int ranks = 2;
};

class LaunchTest : public ::testing::Test {
 protected:
  // Runs without the environment that a launcher of the test itself may have set; the number in the file "launcher" is that of the
  // launcher.
  static ProcessResult mantissa_in(const TemporaryFolder& folder, const std::vector<std::string>& options) {
    std::vector<std::string> words = {"env",
                                      "-u",
                                      "MANTISSA_SECRET",
                                      "-u",
                                      "MANTISSA_SECRET_FILE",
                                      "-u",
                                      "OMP_NUM_THREADS",
                                      "sh",
                                      "-c",
                                      "echo $$ > launcher; exec \"$@\"",
                                      "sh",
                                      MANTISSA_BINARY,
                                      "launch"};
    words.insert(words.end(), options.begin(), options.end());
    return run_process(words, folder.path());
  }
  ProcessResult mantissa(const std::vector<std::string>& options) const { return mantissa_in(folder_, options); }
  ProcessResult launch(std::vector<std::string> options, const std::string& script) const {
    options.insert(options.end(), {"--", "sh", "-c", script});
    return mantissa(options);
  }

  // Does something to a running launcher once all ranks have written the file "ready.R".
  static ProcessResult disturbed(const TemporaryFolder& folder, int ranks, const std::vector<std::string>& options,
                                 const std::function<void(pid_t)>& disturb) {
    ProcessResult result;
    std::thread runner([&] { result = mantissa_in(folder, options); });
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_TRUE(eventually([&] { return std::filesystem::exists(folder / text("ready.", rank)); }));
    disturb(std::stoi(read_file(folder / "launcher")));
    runner.join();
    return result;
  }

  static void expect(const Launched& launched) {
    const TemporaryFolder folder;
    const ScopedTrace trace("", 0, launched.script);
    std::vector<std::string> options = launched.options;
    options.insert(options.end(), {"--", "sh", "-c", launched.script});
    const auto disturb = [&](pid_t launcher) { ::kill(launcher, launched.signal); };
    const ProcessResult run = launched.signal == 0 ? mantissa_in(folder, options) : disturbed(folder, launched.ranks, options, disturb);
    EXPECT_EQ(run.exit_code, launched.code) << run.errors;
    for (const std::string& part : launched.output) EXPECT_THAT(run.output, ::testing::HasSubstr(part));
    for (const std::string& part : launched.errors) EXPECT_THAT(run.errors, ::testing::ContainsRegex(part));
    if (!launched.without.empty()) {
      EXPECT_THAT(run.errors, ::testing::Not(::testing::HasSubstr(launched.without)));
    }
  }
  // Runs some at a time, because most of them wait.
  static void expect_all(const std::vector<Launched>& all) {
    std::atomic<size_t> next{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      threads.emplace_back([&] {
        for (size_t at = next++; at < all.size(); at = next++) expect(all[at]);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  using ScopedTrace = ::testing::ScopedTrace;
  TemporaryFolder folder_;
};

}  // namespace mantissa::test
