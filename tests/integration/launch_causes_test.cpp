// mantissa launch: finds whose failure was the first, by how its workers end and whom they name.
#include <signal.h>

#include "launcher.h"

namespace mantissa::launch_causes_test {

using test::Launched;

class LaunchCauses : public test::LaunchTest {};

const std::vector<std::string> kThree = {"--nproc-per-node", "3"};
constexpr int kKilled = 128 + SIGKILL;

// Reports a cause, like report_cause(), for a command of so many workers.
std::string names_as_cause(int rank, int workers) {
  return text(R"(python3 -c 'import os; os.pwrite(int(os.environ["MANTISSA_STEP_FD"]), ()", rank + 1, R"().to_bytes(8, "little"), 8 * ()",
              workers, R"( + int(os.environ["LOCAL_RANK"])))'; )");
}

// Waits until so many workers are there, whom SIGTERM does not end from then on.
std::string all_there(int workers) {
  return text("trap '' TERM; here=here.$TORCHELASTIC_RESTART_COUNT; touch $here.$RANK; while [ $(ls $here.* | wc -l) -lt ", workers,
              " ]; do sleep 0.02; done; ");
}

std::string first(int rank, const std::string& how) { return text("rank ", rank, " failed first: ", how, "\n"); }

TEST_F(LaunchCauses, WhoFailedFirstGivesTheCodeAndTheTable) {
  const std::string three = all_there(3), two = all_there(2);
  expect_all({
      {"[ $RANK = 1 ] && exit 4; trap 'exit 6' TERM; sleep 30 & wait",
       4,
       {},
       {"mantissa launch: rank 1 failed first: exit code 4\n +rank +host +pid +seconds +ended by +log\n +1 .* exit code 4 "
        "+logs/attempt_0/1\n"},
       "",
       {"--nproc-per-node", "3", "--log-dir", "logs"}},
      {"[ $RANK = 0 ] && kill -SEGV $$; sleep 30", 128 + SIGSEGV, {}, {first(0, "SIGSEGV")}},
      // A worker that leaves because of another is often faster than the other.
      {three + "[ $RANK = 1 ] && sleep 0.5 && exit 4; exit 6", 4, {}, {first(1, "exit code 4")}, "", kThree},
      {"[ $RANK = 1 ] && exit 6; exec sleep 30", 6, {}, {first(1, "exit code 6")}, "", kThree},  // the others were ended
      {three + "[ $RANK = 2 ] && sleep 1 && exit 4; " + names_as_cause(2, 3) + "exit 4", 4, {}, {first(2, "exit code 4")}, "", kThree},
      // The others of a killed rank can have left before the launcher learns of its death: its memory goes back first.
      {three + "[ $RANK = 2 ] && sleep 0.5 && kill -KILL $$; exit 6", kKilled, {}, {first(2, "SIGKILL")}, "", kThree},
      {three + "[ $RANK = 2 ] && kill -KILL $$; [ $RANK = 1 ] && exit 6; " + names_as_cause(1, 3) + "exit 6",  // rank 1 has lost rank 2
       kKilled,
       {},
       {first(2, "SIGKILL")},
       "",
       kThree},
      {two + "[ $RANK = 0 ] && kill -KILL $$; sleep 0.5; exit 70", kKilled, {}, {first(0, "SIGKILL")}},
      // A worker that was ended before it left has the code of its error; one of the data is no reason to start again.
      {three + "[ $RANK = 2 ] && trap - TERM && exec sleep 30; " + names_as_cause(2, 3) + "exit 4",
       4,
       {},
       {first(2, "exit code 4")},
       "restart 1",
       {"--nproc-per-node", "3", "--max-restarts", "1"}},
      // All have the error; the launcher ends two of them, of whom one had blamed the other.
      {three + "[ $RANK = 0 ] && sleep 1 && exit 4; trap - TERM; [ $RANK = 1 ] && " + names_as_cause(2, 3) + "exec sleep 30",
       4,
       {},
       {first(0, "exit code 4")},
       "",
       kThree},
      // Causes are those of their node and attempt.
      {two + "[ $RANK = 3 ] && sleep 1 && exit 4; " + names_as_cause(3, 2) + "exit 4",
       4,
       {},
       {first(3, "exit code 4")},
       "",
       {"--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"}},
      {two + "[ $RANK = 0 ] && sleep 0.5 && exit 70; [ $TORCHELASTIC_RESTART_COUNT = 0 ] && " + names_as_cause(0, 2) + "exit 70",
       70,
       {},
       {first(0, "exit code 70") + ".*restart 1 of 1.*" + first(1, "exit code 70")},
       "",
       {"--nproc-per-node", "2", "--max-restarts", "1"}},
      // The others follow by time.
      {three + "case $RANK in 0) exit 6;; 1) sleep 1; exit 4;; 2) sleep 0.5; exit 6;; esac",
       4,
       {},
       {"\n +1 .*exit code 4 *\n +0 .*exit code 6 *\n +2 .*exit code 6"},
       "",
       kThree},
  });
}

// A scheduler may send the signal to the ranks themselves.
TEST_F(LaunchCauses, RanksThatWereAllStoppedHaveNotFailed) {
  const std::string two = all_there(2);
  expect_all({
      {two + "sleep 0.$RANK; exit 75", 75, {}, {"^$"}},
      {two + "[ $RANK = 0 ] && exit 75; sleep 0.3; exit 7", 7, {}, {first(1, "exit code 7")}},
  });
}

}  // namespace mantissa::launch_causes_test
