// mantissa launch and signals, where a wrapper is between the launcher and what runs.
#include <gmock/gmock.h>
#include <signal.h>

#include "launcher.h"

namespace mantissa::launch_signals_test {

using test::LaunchTest;
using ::testing::HasSubstr;

// A signal goes to a wrapper, too, which dies of it while what it runs saves.
TEST_F(LaunchTest, WhatAWrapperRunsHasTimeToEnd) {
  const auto wrapped = [](const std::string& at_signal) {
    return "sh -c 'trap \"" + at_signal + "\" TERM USR2; touch ready.$RANK; while :; do sleep 0.05; done'; true";
  };
  const auto run = disturbed(2, wrapped("sleep 0.5; echo saved; exit 75"), [](pid_t launcher) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(run.exit_code, 75) << run.errors;
  for (const std::string rank : {"0", "1"}) EXPECT_THAT(run.output, HasSubstr("[rank" + rank + "]:saved\n"));
  const auto going_on = disturbed(2, wrapped("sleep 0.5; echo saved; exit 0"), [](pid_t launcher) { ::kill(launcher, SIGUSR2); });
  EXPECT_EQ(going_on.exit_code, 0) << going_on.errors;
  EXPECT_THAT(going_on.output, HasSubstr("[rank1]:saved\n"));
  const auto failed = disturbed(
      2,
      "[ $RANK = 1 ] && touch ready.1 && while [ ! -e ready.0 ]; do sleep 0.05; done && exit 4; " + wrapped("sleep 0.5; echo left; exit 6"),
      [](pid_t) {});
  EXPECT_EQ(failed.exit_code, 4) << failed.errors;
  EXPECT_THAT(failed.output, HasSubstr("[rank0]:left\n"));
}

// A wrapper that exits in its trap does not wait for what it runs. Its code counts, unless it only tells that a signal ended its wait,
// which must therefore have begun.
TEST_F(LaunchTest, WhatAWrapperLeavesInItsTrapHasTimeToEnd) {
  struct Case {
    std::string trap;
    int code;
  };
  for (const Case& each : {Case{"exit", 75}, {"exit 3", 3}, {"exit 0", 0}}) {
    const auto run = disturbed(2,
                               "trap '" + each.trap + "' TERM; sh -c 'trap \"sleep 0.5; echo saved; exit 75\" TERM; " +
                                   "until grep -q \") S \" /proc/$PPID/stat; do sleep 0.01; done; touch ready.$RANK; " +
                                   "while :; do sleep 0.05; done' & wait",
                               [](pid_t launcher) { ::kill(launcher, SIGTERM); });
    EXPECT_EQ(run.exit_code, each.code) << each.trap << '\n' << run.errors;
    for (const std::string rank : {"0", "1"}) EXPECT_THAT(run.output, HasSubstr("[rank" + rank + "]:saved\n")) << each.trap;
  }
}

// A member that is stopped cannot save, and is killed at once when the job fails; its wrapper said that all was well.
TEST_F(LaunchTest, WhatIsKilledAfterItsWrapperEndedIsNoSuccess) {
  const auto run = disturbed(2,
                             "if [ $RANK = 1 ]; then trap 'sleep 0.5; exit 6' TERM; touch ready.1; while :; do sleep 0.05; done; fi; "
                             "trap 'exit 0' TERM; sh -c 'kill -STOP $$' & touch ready.0; wait",
                             [](pid_t launcher) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(run.exit_code, 6) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("SIGKILL")) << "rank 0, which saved nothing";
}

// A wrapper's `touch` or `tee` succeeds also where the command of the wrapper never ran.
TEST_F(LaunchTest, AMemberThatSucceedsAfterTheSignalIsNotTheCommand) {
  const auto run = disturbed(2, "sh -c 'trap \"sleep 0.3; exit 0\" TERM; touch ready.$RANK; while :; do sleep 0.05; done'; exec sleep 30",
                             [](pid_t launcher) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(run.exit_code, 128 + SIGTERM) << run.errors;
}

// The others of a group often fail because one has.
TEST_F(LaunchTest, OfTheMembersThatAWrapperLeavesTheFirstThatFailsGivesTheCode) {
  const auto member = [](const std::string& at_signal, const std::string& before) {
    return "sh -c 'trap \"" + at_signal + "\" TERM; " + before + "while :; do sleep 0.05; done' & ";
  };
  const std::string first = member("sleep 0.3; exit 4", "touch first.$RANK; "),
                    second = member("sleep 1.5; exit 6", "touch second.$RANK; ");
  const std::string both = "while [ ! -e first.$RANK ] || [ ! -e second.$RANK ]; do sleep 0.05; done; touch ready.$RANK; wait";
  const auto run = disturbed(1, first + second + both, [](pid_t launcher) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(run.exit_code, 4) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("rank 0 failed first: exit code 4\n")) << "and not the signal of the wrapper";
}

// Its signal says nothing that the wrapper's does not.
TEST_F(LaunchTest, AMemberThatIsKilledAfterTheWrapperDoesNotGiveTheCode) {
  const auto run = disturbed(1, "sh -c 'trap \"sleep 0.3; kill -9 \\$\\$\" TERM; touch ready.$RANK; while :; do sleep 0.05; done'; true",
                             [](pid_t launcher) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(run.exit_code, 128 + SIGTERM) << run.errors;
}

TEST_F(LaunchTest, WhatAWrapperLeftToItselfDoesNotGiveItsCode) {
  const auto run = launch({}, "(sh -c 'touch left; exit 5' &); while [ ! -e left ]; do sleep 0.05; done; sleep 0.5; echo done");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("[rank0]:done\n"));
}

TEST_F(LaunchTest, AStoppedWorkerIsNotWaitedFor) {
  const auto start = test::Clock::now();
  const auto run = disturbed(2, "touch ready.$RANK; [ $RANK = 0 ] && kill -STOP $$; while [ ! -e go ]; do sleep 0.05; done; exit 6",
                             [&](pid_t) { test::write_file(folder_ / "go", ""); });
  EXPECT_EQ(run.exit_code, 6);
  EXPECT_THAT(run.errors, HasSubstr("SIGKILL"));
  EXPECT_LT(test::Clock::now() - start, std::chrono::seconds(25)) << "and not for the grace of 30 s";
}

}  // namespace mantissa::launch_signals_test
