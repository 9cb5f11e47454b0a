// mantissa launch and signals: whom they reach, also where a wrapper is between the launcher and the program, and how it then ends.
#include <signal.h>

#include <regex>

#include "launcher.h"

namespace mantissa::launch_signals_test {

using test::Launched;

class LaunchSignals : public test::LaunchTest {};

const std::string kWait = "touch ready.$RANK; while :; do sleep 0.05; done";
const std::vector<std::string> kSaved = {"[rank0]:saved\n", "[rank1]:saved\n"}, kAlone = {};

TEST_F(LaunchSignals, AreHandedOnAndEndWithoutRestart) {
  const std::vector<std::string> restarts = {"--nproc-per-node", "2", "--max-restarts", "2"};
  std::vector<Launched> all = {{"touch ready.$RANK; exec sleep 30", 128 + SIGTERM, {}, {}, "", {"--nproc-per-node", "2"}, SIGTERM},
                               // SIGUSR2 asks for a save, and not for an end.
                               {"[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; trap 'exit 6' USR2; " + kWait,
                                0,
                                {},
                                {"restart 1 of 2"},
                                "",
                                {"--max-restarts", "2"},
                                SIGUSR2,
                                1}};
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2})
    all.push_back({"trap 'echo asked; exit 75' TERM INT HUP QUIT USR1 USR2; " + kWait,
                   75,
                   {"[rank0]:asked\n", "[rank1]:asked\n"},
                   {},
                   "mantissa launch",
                   {"--nproc-per-node", "2"},
                   signal});
  // A peer that left first makes a worker's answer to the signal a 6.
  for (const auto& [signal, end, code] : {std::tuple(SIGTERM, "exit 6", 6),
                                          {SIGINT, "exit 70", 70},
                                          {SIGHUP, "kill -9 $$", 137},
                                          {SIGQUIT, "exit 6", 6},
                                          {SIGUSR1, "exit 70", 70}})
    all.push_back({text("[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; trap '", end, "' TERM INT HUP QUIT USR1; ", kWait),
                   code,
                   {},
                   {"failed first"},
                   "restart 1 of 2",
                   restarts,
                   signal});
  expect_all(all);
}

// The program that a wrapper runs has time to end, and so has one that it leaves in its trap.
TEST_F(LaunchSignals, ReachWhatAWrapperRuns) {
  const auto wrapped = [](const std::string& at_signal) { return "sh -c 'trap \"" + at_signal + "\" TERM USR2; " + kWait + "'; "; };
  const auto member = [](const std::string& at_signal, const std::string& before) {
    return "sh -c 'trap \"" + at_signal + "\" TERM; touch " + before + "; while :; do sleep 0.05; done' & ";
  };
  const auto exits_in_trap = [](const std::string& end) {  // whose wait must have begun
    return "trap '" + end + "' TERM; sh -c 'trap \"sleep 0.5; echo saved; exit 75\" TERM; " +
           "until grep -q \") S \" /proc/$PPID/stat; do sleep 0.01; done; " + kWait + "' & wait";
  };
  const std::vector<std::string> two = {"--nproc-per-node", "2"};
  expect_all({
      // The signal goes to the wrapper, too, which dies of it.
      {wrapped("sleep 0.5; echo saved; exit 75") + "true", 75, kSaved, {}, "", two, SIGTERM},
      {wrapped("sleep 0.5; echo saved; exit 0") + "true", 0, kSaved, {}, "", two, SIGUSR2},
      {"[ $RANK = 1 ] && while [ ! -e ready.0 ]; do sleep 0.05; done && exit 4; " + wrapped("sleep 0.5; echo left; exit 6") + "true",
       4,
       {"[rank0]:left\n"}},
      // One that exits in its trap does not wait. Its code counts, unless it only tells that a signal ended its wait.
      {exits_in_trap("exit"), 75, kSaved, {}, "", two, SIGTERM},
      {exits_in_trap("exit 3"), 3, kSaved, {}, "", two, SIGTERM},
      {exits_in_trap("exit 0"), 0, kSaved, {}, "", two, SIGTERM},
      // A member that is stopped cannot save, and is killed at once when the job fails; its wrapper said that all was well.
      {"if [ $RANK = 1 ]; then trap 'sleep 0.5; exit 6' TERM; " + kWait +
           "; fi; trap 'exit 0' TERM; sh -c 'kill -STOP $$' & until grep -q 'State:.T' /proc/$!/status; do sleep 0.01; done; touch "
           "ready.0; wait",
       6,
       {},
       {"SIGKILL"},
       "",
       two,
       SIGTERM},
      // A wrapper's `touch` or `tee` succeeds also where the command of the wrapper never ran.
      {"sh -c 'trap \"sleep 0.3; exit 0\" TERM; " + kWait + "'; exec sleep 30", 128 + SIGTERM, {}, {}, "", two, SIGTERM},
      // The others of a group often fail because one has.
      {member("sleep 0.3; exit 4", "first") + member("sleep 1.5; exit 6", "second") +
           "while [ ! -e first ] || [ ! -e second ]; do sleep 0.05; done; touch ready.0; wait",
       4,
       {},
       {"rank 0 failed first: exit code 4\n"},
       "",
       kAlone,
       SIGTERM,
       1},
      // The signal of a member that is killed after the wrapper says nothing that the wrapper's does not.
      {"sh -c 'trap \"sleep 0.3; kill -9 \\$\\$\" TERM; " + kWait + "'; true", 128 + SIGTERM, {}, {}, "", kAlone, SIGTERM, 1},
      {"(sh -c 'touch left; exit 5' &); while [ ! -e left ]; do sleep 0.05; done; sleep 0.5; echo done",
       0,
       {"[rank0]:done\n"},
       {},
       "",
       kAlone},
  });
}

TEST_F(LaunchSignals, AStoppedWorkerIsKilledWithoutTheGraceThatOthersHave) {
  const auto run = launch(
      {"--nproc-per-node", "2"},
      "if [ $RANK = 0 ]; then echo $$ > pid; kill -STOP $$; fi; until grep -q ') T ' /proc/$(cat pid)/stat; do sleep 0.05; done; exit 6");
  EXPECT_EQ(run.exit_code, 6);
  std::smatch stopped, failed;
  ASSERT_TRUE(std::regex_search(run.errors, stopped, std::regex(R"(\n +0 .* ([0-9]+\.[0-9]+) +SIGKILL)"))) << run.errors;
  ASSERT_TRUE(std::regex_search(run.errors, failed, std::regex(R"(\n +1 .* ([0-9]+\.[0-9]+) +exit code 6)"))) << run.errors;
  EXPECT_LT(std::stod(stopped[1]), std::stod(failed[1]) + 30) << run.errors;
}

TEST_F(LaunchSignals, ASecondInterruptKillsAtOnce) {
  const std::string command = "trap '' INT; trap 'touch asked' TERM; " + kWait;
  const auto run = disturbed(folder_, 2, {"--nproc-per-node", "2", "--", "sh", "-c", command}, [](pid_t launcher) {
    ::kill(launcher, SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ::kill(launcher, SIGINT);
  });
  EXPECT_EQ(run.exit_code, 130);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "asked")) << "SIGTERM and a grace come after failures";
}

TEST_F(LaunchSignals, NobodyOutlivesALauncherThatIsKilledOrAWorkerThatLeft) {
  const auto run =
      disturbed(folder_, 3, {"--nproc-per-node", "3", "--", "sh", "-c", "echo $$ > pid.$RANK; touch ready.$RANK; exec sleep 1000"},
                [](pid_t launcher) { ::kill(launcher, SIGKILL); });
  EXPECT_EQ(run.exit_code, 137);
  EXPECT_EQ(launch({"--nproc-per-node", "2"}, "sleep 1000 & echo $! > pid.$((RANK + 3)); exit 0").exit_code, 0);
  for (int number = 0; number < 5; ++number) EXPECT_TRUE(test::ends(std::stoi(test::read_file(folder_ / text("pid.", number))))) << number;
}

// Signals that the launcher blocks or ignores itself, or that were blocked when it was started, do not count.
TEST_F(LaunchSignals, CommandsGetACleanMask) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto run = launch({}, "grep -E '^Sig(Blk|Ign)' /proc/self/status");
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, ::testing::HasSubstr("[rank0]:SigBlk:\t0000000000000000\n"));
  EXPECT_THAT(run.output,
              ::testing::HasSubstr("[rank0]:" + test::run_process({"grep", "^SigIgn", "/proc/self/status"}, folder_.path()).output));
}

TEST_F(LaunchSignals, AnIgnoredHangupIsIgnoredByAll) {
  const std::string script = "grep SigIgn /proc/self/status; kill -HUP $PPID; sleep 0.2; exit $((70 * (1 - TORCHELASTIC_RESTART_COUNT)))";
  const auto run = test::run_process(
      {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh", MANTISSA_BINARY, "launch", "--max-restarts", "1", "--", "sh", "-c", script},
      folder_.path());
  EXPECT_THAT(run.output, ::testing::ContainsRegex("SigIgn:\t000000000000000[1357]\n"))
      << "a job in the background ignores SIGINT and SIGQUIT, too";
  EXPECT_EQ(run.exit_code, 0) << "nobody asked for an end, so it is started again\n" << run.errors;
}

}  // namespace mantissa::launch_signals_test
