// Signals at random times of runs that multiply in fp32 (tests/slow/signal_trials_test.cpp has more of them), and which threads take them.
#include <sys/syscall.h>

#include <algorithm>

#include "signal_trials.h"

namespace mantissa::signals_test {

namespace fs = std::filesystem;
using test::BackgroundProcess;
using test::SignalTrials;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_P(SignalTrials, AnswersSignalsAtAnyTimeAndResumesBitForBit) { stop_and_save_at_random_times(2, 5); }

INSTANTIATE_TEST_SUITE_P(, SignalTrials,
                         ::testing::Values(test::SignalCase{"avx2_ranks", "AVX2", 2}, test::SignalCase{"native_alone", "ALL", 1}),
                         test::case_name);

// ---- which threads take them

constexpr int kSent[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGPROF};

// A set of signals from a file of /proc/PID: "SigBlk", "SigIgn" or "SigCgt".
uint64_t signals_in(const std::string& status_file, const std::string& set) {
  const std::string status = test::read_file(status_file);
  return std::stoull(status.substr(status.find(set + ":") + set.size() + 1), nullptr, 16);
}

bool contains(uint64_t set, int signal) { return (set >> (signal - 1) & 1) != 0; }

class SignalThreads : public test::LaunchedTraining {
 protected:
  // A run in a folder of its own, whose output is in the file NAME.out; on two ranks, or alone.
  std::vector<std::string> endless(const std::string& name, bool on_ranks, std::vector<std::string> more = {}) const {
    std::vector<std::string> words = {MANTISSA_BINARY};
    if (on_ranks) words.insert(words.end(), {"launch", "--nproc-per-node", "2", "--"});
    more.insert(more.end(), {"--set", "checkpoint.resume=auto", "--set", "training.steps=1000000"});
    for (const std::string& word : train(name, more)) words.push_back(word);
    return words;
  }
  std::unique_ptr<BackgroundProcess> start(const std::string& name, std::vector<std::string> words) const {
    fs::remove(folder_ / name + ".out");
    return std::make_unique<BackgroundProcess>(std::move(words), folder_.path(), folder_ / name + ".out");
  }
  static void expect_to_stop(BackgroundProcess& run, int signal) {
    run.send(signal);
    EXPECT_EQ(run.wait(), 75) << run.output();
  }

  static void expect_that_one_thread_takes_signals(const std::string& process) {
    size_t threads = 0, open = 0;
    for (const auto& entry : fs::directory_iterator("/proc/" + process + "/task")) {
      const uint64_t blocked = signals_in(entry.path() / "status", "SigBlk");
      const auto count = std::count_if(std::begin(kSent), std::end(kSent), [&](int signal) { return contains(blocked, signal); });
      ++threads;
      if (count == 0) {
        ++open;
        EXPECT_NE(entry.path().filename(), process) << "the main thread multiplies";
      } else {
        EXPECT_EQ(count, std::ssize(kSent)) << "thread " << entry.path().filename();
        EXPECT_FALSE(contains(blocked, SIGTSTP) || contains(blocked, SIGTTIN) || contains(blocked, SIGSEGV));
      }
    }
    EXPECT_EQ(open, 1U);
    EXPECT_GE(threads, 4U) << "main, signals, and two of the pool or those of the ranks";
  }
  // Checks the answer of a run to a hangup, and that of a run that nohup started.
  void hang_up(bool on_ranks) const {
    const std::string name = on_ranks ? "ranks" : "alone";
    const std::vector<std::string> command = endless(name, on_ranks, {"--set", "training.threads=3"});
    const auto run = start(name, command);
    ASSERT_TRUE(run->prints("step     2/")) << run->output();
    for (const std::string& process : on_ranks ? test::children_of(run->pid()) : std::vector{std::to_string(run->pid())})
      expect_that_one_thread_takes_signals(process);
    expect_to_stop(*run, SIGHUP);
    std::vector<std::string> lasting = {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh"};
    lasting.insert(lasting.end(), command.begin(), command.end());
    const auto lasts = start(name, lasting);
    ASSERT_TRUE(lasts->prints("continues at")) << lasts->output();
    lasts->send(SIGHUP);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_THAT(lasts->output(), Not(HasSubstr("stopped")));
    expect_to_stop(*lasts, SIGTERM);
  }
};

TEST_F(SignalThreads, OneOfTrainingTakesThemAndAHangupStopsUnlessTheRunIsToOutliveItsTerminal) {
  std::thread ranks([&] { hang_up(true); });
  hang_up(false);
  ranks.join();
}

// They multiply, too, on threads that block nothing. A fault is no signal that somebody sends.
TEST_F(SignalThreads, CommandsButTrainingHaveHandlersForFaultsOnly) {
  const auto bench = start("bench", {MANTISSA_BINARY, "bench", "gemm", "--time-budget", "20"});
  ASSERT_TRUE(bench->prints("gemm")) << bench->output();
  const uint64_t caught = signals_in("/proc/" + std::to_string(bench->pid()) + "/status", "SigCgt");
  for (int signal = 1; signal <= SIGRTMAX; ++signal) {
    const bool fault = signal == SIGILL || signal == SIGBUS || signal == SIGFPE || signal == SIGSEGV;
    const bool of_the_c_library = signal >= 32 && signal < SIGRTMIN;  // to cancel threads and to change users
    EXPECT_FALSE(contains(caught, signal) && !fault && !of_the_c_library) << "signal " << signal;
  }
}

TEST_F(SignalThreads, SignalsThatTheParentBlockedAreTaken) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto run = start("run", endless("run", false));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ASSERT_TRUE(run->prints(" parameters | ")) << run->output();
  expect_to_stop(*run, SIGTERM);
}

// A scheduler knows a rank as soon as there is one, long before it has a handler.
TEST_F(SignalThreads, AWishForASaveWaitsUntilARankHasAHandler) {
  const auto run = start("run", endless("run", true, {"--set", "checkpoint.interval=0"}));
  EXPECT_TRUE(test::eventually([&] {
    for (const std::string& rank : test::children_of(run->pid())) ::kill(std::stoi(rank), SIGUSR2);
    return run->output().find("save  ") != std::string::npos || run->output().find("failed first") != std::string::npos;
  }));
  EXPECT_THAT(run->output(), Not(HasSubstr("failed first")));
  expect_to_stop(*run, SIGTERM);
}

// ---- handlers that have to run on a thread that multiplies

// A GEMM runs one time in eight or so when the signal comes. Without the handlers of UCX, which would bring an alternate stack for the
// main thread.
TEST_P(SignalTrials, ReportsOfTheStackDisturbNothing) {
  if (GetParam().ranks == 1) GTEST_SKIP() << "a process alone is not watched";
  std::vector<std::string> command = words("told");
  command.insert(command.begin() + 1, "UCX_HANDLE_ERRORS=none");
  BackgroundProcess run(command, folder_.path(), folder_ / "out");
  ASSERT_TRUE(run.prints("step     2/")) << run.output();
  const std::vector<std::string> ranks = test::children_of(run.pid());
  ASSERT_EQ(ranks.size(), 2U);
  for (int i = 0; i < 100; ++i) {
    for (const std::string& rank : ranks) ::kill(std::stoi(rank), SIGRTMIN);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
  }
  run.send(SIGTERM);
  EXPECT_EQ(run.wait(), 75) << run.output();
}

// UCX reports faults: without a stack for its handler the frame itself may cause a second one, or an abort.
TEST_P(SignalTrials, AFaultOfAThreadThatMultipliesIsReported) {
  if (GetParam().ranks > 1) GTEST_SKIP() << "with one process its threads are at hand";
  for (const std::string name : {"once", "twice"}) {
    fs::remove(folder_ / "out");
    BackgroundProcess run(words(name, {"training.threads=2"}), folder_.path(), folder_ / "out");
    ASSERT_TRUE(run.prints("step     2/")) << run.output();
    pid_t last = 0;
    for (const auto& entry : fs::directory_iterator("/proc/" + std::to_string(run.pid()) + "/task"))
      last = std::max(last, std::stoi(entry.path().filename()));
    ASSERT_GT(last, run.pid()) << "a thread of the pool";
    ASSERT_EQ(::syscall(SYS_tgkill, run.pid(), last, SIGSEGV), 0);
    EXPECT_EQ(run.wait(), 128 + SIGSEGV);
    EXPECT_THAT(run.output(), HasSubstr("Caught signal 11"));
    EXPECT_THAT(run.output(), HasSubstr("backtrace"));
  }
}

// A step of hours, most of it in fp32 GEMMs. A report may find the thread between two kernels, where it packs an operand, so that a run
// that has no stack of a kernel says nothing; each run reports twice a rank.
TEST_F(SignalThreads, AMainThreadStuckInAGemmReportsWhoCalledIt) {
  std::vector<std::string> sets;
  for (const char* set :
       {"precision={\"dtype\":\"fp32\"}", "model.hidden_size=1024", "model.intermediate_size=4096", "training.grad_accum=100000",
        "training.micro_batch_size=32", "training.global_batch_size=null", "training.accumulation=running", "parallel.step_timeout_s=2"})
    sets.insert(sets.end(), {"--set", set});
  const std::string in_a_kernel = "in a kernel that oneDNN generated, called by:\n";
  std::string output;
  for (int runs = 0; runs < 4 && output.find(in_a_kernel) == std::string::npos; ++runs) {
    const auto run = start("run", endless("run", true, sets));
    ASSERT_EQ(run->wait(), 6);
    ASSERT_THAT(run->output(), HasSubstr("no progress for 2 s (parallel.step_timeout_s)"));
    ASSERT_THAT(run->output(), HasSubstr("__libc_start_main")) << "the whole stack";
    ASSERT_THAT(run->output(), Not(HasSubstr("no stack:")));
    output += run->output();
  }
  EXPECT_THAT(output, HasSubstr(in_a_kernel));
}

}  // namespace mantissa::signals_test
