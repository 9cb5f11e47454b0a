// mantissa launch: whose failure was the first, by how its workers end and whom they name.
#include <gmock/gmock.h>
#include <signal.h>

#include "launcher.h"

namespace mantissa::launch_causes_test {

using test::LaunchTest;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

TEST_F(LaunchTest, FirstFailureByTimeGivesTheCodeAndTheTable) {
  const auto run = launch({"--nproc-per-node", "3", "--log-dir", "logs"}, "[ $RANK = 1 ] && exit 4; trap 'exit 6' TERM; sleep 30 & wait");
  EXPECT_EQ(run.exit_code, 4);
  EXPECT_THAT(run.errors, HasSubstr("mantissa launch: rank 1 failed first: exit code 4\n"));
  EXPECT_THAT(run.errors, ContainsRegex("rank +host +pid +seconds +ended by +log\n +1 .* exit code 4 +logs/attempt_0/1\n"));
  const auto killed = launch({"--nproc-per-node", "2"}, "[ $RANK = 0 ] && kill -SEGV $$; sleep 30");
  EXPECT_EQ(killed.exit_code, 128 + SIGSEGV);
  EXPECT_THAT(killed.errors, HasSubstr("rank 0 failed first: SIGSEGV"));
}

// As report_cause() does, for a command of so many workers.
std::string names_as_cause(int rank, int workers) {
  return text(R"(python3 -c 'import os; os.pwrite(int(os.environ["MANTISSA_STEP_FD"]), ()", rank + 1, R"().to_bytes(8, "little"), 8 * ()",
              workers, R"( + int(os.environ["LOCAL_RANK"])))'; )");
}

// Until so many workers are there, whom SIGTERM does not end from then on.
std::string all_there(const std::string& name, int workers) {
  return text("trap '' TERM; touch ", name, ".$RANK; while [ $(ls ", name, ".* | wc -l) -lt ", workers, " ]; do sleep 0.02; done; ");
}

// Who leaves because of another is often faster than the other.
TEST_F(LaunchTest, WhoLeftBecauseOfAnotherIsNotTheFirst) {
  const auto after = [](const std::string& name) { return "while [ ! -e " + name + " ]; do sleep 0.02; done; "; };
  const auto lost =
      launch({"--nproc-per-node", "3"}, "trap '' TERM; [ $RANK = 1 ] && touch a && sleep 0.5 && exit 4; " + after("a") + "exit 6");
  EXPECT_EQ(lost.exit_code, 4);
  EXPECT_THAT(lost.errors, HasSubstr("rank 1 failed first: exit code 4"));
  const auto alone = launch({"--nproc-per-node", "3"}, "[ $RANK = 1 ] && exit 6; exec sleep 30");
  EXPECT_EQ(alone.exit_code, 6) << "the others were ended by the launcher";
  EXPECT_THAT(alone.errors, HasSubstr("rank 1 failed first: exit code 6"));
  const auto named = launch({"--nproc-per-node", "3"},
                            "trap '' TERM; [ $RANK = 2 ] && touch b && sleep 1 && exit 4; " + after("b") + names_as_cause(2, 3) + "exit 4");
  EXPECT_EQ(named.exit_code, 4);
  EXPECT_THAT(named.errors, HasSubstr("rank 2 failed first: exit code 4"));
}

// The others of a killed rank can have left before the launcher learns of its death: its memory goes back first.
TEST_F(LaunchTest, WhoWasKilledIsTheFirstAlsoWhereItsDeathIsSeenLater) {
  const auto killed = launch({"--nproc-per-node", "3"}, all_there("k", 3) + "[ $RANK = 2 ] && sleep 0.5 && kill -KILL $$; exit 6");
  EXPECT_EQ(killed.exit_code, 128 + SIGKILL);
  EXPECT_THAT(killed.errors, HasSubstr("rank 2 failed first: SIGKILL"));
  const auto blamed = launch({"--nproc-per-node", "3"}, all_there("l", 3) + "[ $RANK = 2 ] && kill -KILL $$; [ $RANK = 1 ] && exit 6; " +
                                                            names_as_cause(1, 3) + "exit 6");
  EXPECT_EQ(blamed.exit_code, 128 + SIGKILL) << "rank 1 has lost rank 2";
  EXPECT_THAT(blamed.errors, HasSubstr("rank 2 failed first: SIGKILL"));
}

TEST_F(LaunchTest, WhoWasEndedBeforeItLeftHasTheCodeOfItsError) {
  const auto slow = launch({"--nproc-per-node", "3", "--max-restarts", "1"},
                           all_there("g", 3) + "[ $RANK = 2 ] && trap - TERM && exec sleep 30; " + names_as_cause(2, 3) + "exit 4");
  EXPECT_EQ(slow.exit_code, 4);
  EXPECT_THAT(slow.errors, HasSubstr("rank 2 failed first: exit code 4"));
  EXPECT_EQ(slow.errors.find("restart 1"), std::string::npos) << "an error of the data is no reason to start again";
  // All have the error; the launcher ends two of them, of whom one had blamed the other.
  const auto all =
      launch({"--nproc-per-node", "3"}, all_there("h", 3) + "[ $RANK = 0 ] && sleep 1 && exit 4; trap - TERM; [ $RANK = 1 ] && " +
                                            names_as_cause(2, 3) + "exec sleep 30");
  EXPECT_EQ(all.exit_code, 4);
  EXPECT_THAT(all.errors, HasSubstr("rank 0 failed first: exit code 4"));
}

TEST_F(LaunchTest, CausesAreThoseOfTheirNodeAndAttempt) {
  const auto second = launch({"--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"},
                             all_there("c", 2) + "[ $RANK = 3 ] && sleep 1 && exit 4; " + names_as_cause(3, 2) + "exit 4");
  EXPECT_EQ(second.exit_code, 4);
  EXPECT_THAT(second.errors, HasSubstr("rank 3 failed first: exit code 4"));
  const auto again = launch({"--nproc-per-node", "2", "--max-restarts", "1"}, all_there("d.$TORCHELASTIC_RESTART_COUNT", 2) +
                                                                                  "[ $RANK = 0 ] && sleep 0.5 && exit 70; "
                                                                                  "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && " +
                                                                                  names_as_cause(0, 2) + "exit 70");
  EXPECT_EQ(again.exit_code, 70);
  EXPECT_THAT(again.errors, ContainsRegex("rank 0 failed first: exit code 70.*restart 1 of 1.*rank 1 failed first: exit code 70"));
}

TEST_F(LaunchTest, WhoWasKilledFirstIsTheFirstAndTheOthersFollowByTime) {
  const auto killed = launch({"--nproc-per-node", "2"}, all_there("e", 2) + "[ $RANK = 0 ] && kill -KILL $$; sleep 0.5; exit 70");
  EXPECT_EQ(killed.exit_code, 128 + SIGKILL);
  EXPECT_THAT(killed.errors, HasSubstr("rank 0 failed first: SIGKILL"));
  const auto order =
      launch({"--nproc-per-node", "3"}, all_there("f", 3) + "case $RANK in 0) exit 6;; 1) sleep 1; exit 4;; 2) sleep 0.5; exit 6;; esac");
  EXPECT_EQ(order.exit_code, 4);
  EXPECT_THAT(order.errors, ContainsRegex("\n +1 .*exit code 4 *\n +0 .*exit code 6 *\n +2 .*exit code 6"));
}

// A scheduler may send the signal to the ranks themselves.
TEST_F(LaunchTest, RanksThatWereAllStoppedHaveNotFailed) {
  const auto stopped =
      launch({"--nproc-per-node", "2"}, "trap '' TERM; touch c.$RANK; while [ ! -e c.1 ]; do sleep 0.02; done; sleep 0.$RANK; exit 75");
  EXPECT_EQ(stopped.exit_code, 75);
  EXPECT_EQ(stopped.errors, "");
  const auto one =
      launch({"--nproc-per-node", "2"},
             "trap '' TERM; touch d.$RANK; while [ ! -e d.1 ]; do sleep 0.02; done; [ $RANK = 0 ] && exit 75; sleep 0.3; exit 7");
  EXPECT_EQ(one.exit_code, 7);
  EXPECT_THAT(one.errors, HasSubstr("rank 1 failed first: exit code 7"));
}

}  // namespace mantissa::launch_causes_test
