// mantissa launch with small commands: variables of workers, output that is shown, how it ends, when it starts again.
#include <gmock/gmock.h>

#include <algorithm>
#include <sstream>

#include "launcher.h"

namespace mantissa::launch_test {

using test::Launched;
using test::LaunchTest;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(LaunchTest, WorkersAreToldAllThatTorchrunTells) {
  const auto run = launch({"--nproc-per-node", "2", "--nnodes=2", "--node_rank", "1", "--master-addr", "node0", "--max-restarts", "3"},
                          "env | grep -E '^(RANK|WORLD_SIZE|LOCAL_|MASTER_|GROUP_|ROLE_|TORCH|OMP_|MANTISSA_SECRET)' | sort");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  for (const std::string line :
       {"RANK=2", "WORLD_SIZE=4", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=node0", "MASTER_PORT=29500", "GROUP_RANK=1",
        "GROUP_WORLD_SIZE=2", "ROLE_RANK=2", "ROLE_NAME=default", "ROLE_WORLD_SIZE=4", "TORCHELASTIC_RESTART_COUNT=0",
        "TORCHELASTIC_MAX_RESTARTS=3", "TORCHELASTIC_USE_AGENT_STORE=False", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "OMP_NUM_THREADS=1"}) {
    EXPECT_THAT(run.output, HasSubstr("[rank2]:" + line + "\n"));
  }
  EXPECT_THAT(run.output, HasSubstr("[rank3]:LOCAL_RANK=1\n"));
  EXPECT_THAT(run.output, HasSubstr("TORCHELASTIC_RUN_ID="));
  EXPECT_THAT(run.output, Not(HasSubstr("MANTISSA_SECRET"))) << "several nodes could not share one made here";
}

TEST_F(LaunchTest, OneNodeGetsAFreePortAndASecret) {
  for (const std::string option : {"--standalone", "--nproc-per-node=1"}) {
    const auto run = launch({option}, "echo port $MASTER_PORT token $MANTISSA_SECRET addr $MASTER_ADDR omp [$OMP_NUM_THREADS]");
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_THAT(run.output, ContainsRegex("port [0-9]+ token [0-9a-f]{64} addr 127.0.0.1 omp \\[\\]"));
    EXPECT_THAT(run.output, Not(HasSubstr("port 29500")));
  }
  EXPECT_THAT(launch({"--master-port", "4444"}, "echo $MASTER_PORT").output, HasSubstr("[rank0]:4444\n"));
}

TEST_F(LaunchTest, SubcommandIsRunByThisBinary) {
  const auto run = mantissa({"--", "config", "schema"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("[rank0]:{\n"));
  EXPECT_EQ(mantissa({"--", "eval", "--nonesuch"}).exit_code, 2);
}

TEST_F(LaunchTest, CommandOfOneProcessIsRefusedOnMany) {
  const auto run = mantissa({"--nproc-per-node", "2", "--", "doctor"});
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_THAT(run.errors, HasSubstr("mantissa doctor runs as one process, and this is rank"));
  EXPECT_THAT(run.errors, HasSubstr("started by mantissa launch (RANK, WORLD_SIZE)"));
  const auto half = test::run_process({"env", "RANK=0", MANTISSA_BINARY, "doctor"}, folder_.path());
  EXPECT_EQ(half.exit_code, 2);
  EXPECT_THAT(half.errors, HasSubstr("RANK=0 is set, and WORLD_SIZE is not"));
}

TEST_F(LaunchTest, LinesStayWholeAndLongOnesAreCut) {
  const auto run =
      launch({"--nproc-per-node", "3"},
             "i=0; while [ $i -lt 300 ]; do echo line $i of $RANK; i=$((i+1)); done; echo error >&2; head -c 200000 /dev/zero | tr "
             "'\\0' x; printf end");
  EXPECT_EQ(run.exit_code, 0);
  for (int rank = 0; rank < 3; ++rank) {
    const std::string prefix = "[rank" + std::to_string(rank) + "]:";
    for (const int line : {0, 150, 299})
      EXPECT_THAT(run.output, HasSubstr(prefix + "line " + std::to_string(line) + " of " + std::to_string(rank) + "\n"));
    EXPECT_THAT(run.errors, HasSubstr(prefix + "error\n"));
  }
  EXPECT_THAT(run.output, ContainsRegex("xend\n"));
  EXPECT_EQ(std::count(run.output.begin(), run.output.end(), 'x'), 600000);
  std::istringstream lines(run.output);
  for (std::string line; std::getline(lines, line);) EXPECT_TRUE(line.starts_with("[rank")) << line.substr(0, 40);
}

TEST_F(LaunchTest, LogsHoldWhatIsNotShown) {
  const auto run = launch({"--nproc-per-node", "2", "--log-dir", "logs", "--tee", "1"}, "echo out $RANK; echo err $RANK >&2");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("[rank1]:out 1\n"));
  EXPECT_EQ(run.errors, "");
  EXPECT_EQ(test::read_file(folder_ / "logs/attempt_0/1/stderr.log"), "err 1\n");
  EXPECT_EQ(test::read_file(folder_ / "logs/attempt_0/0/stdout.log"), "out 0\n");
  const auto filtered = launch({"--nproc-per-node", "3", "--ranks-filter", "0,2"}, "echo out $RANK");
  EXPECT_THAT(filtered.output, HasSubstr("[rank0]:"));
  EXPECT_THAT(filtered.output, HasSubstr("[rank2]:"));
  EXPECT_THAT(filtered.output, Not(HasSubstr("[rank1]:")));
}

TEST_F(LaunchTest, AnErrorOfSeveralRanksIsShownOnce) {
  std::thread beside([] {
    expect_all({
        // Text that is no error, or was not shown, is not held back.
        {"printf 'a table\n  of rows\n' >&2",
         0,
         {},
         {"\\[rank0\\]:a table\n\\[rank0\\]:  of rows\n", "\\[rank1\\]:a table\n\\[rank1\\]:  of rows\n"}},
        {"sleep 0.$RANK; echo 'error: x' >&2", 0, {}, {"^\\[rank1\\]:error: x\n$"}, "", {"--nproc-per-node", "2", "--ranks-filter", "1"}},
        {"sleep 0.$RANK; printf 'error: a mistake\n  of %s\nend\n' $RANK >&2; sleep 0.3",
         0,
         {},
         {"\\[rank0\\]:error: a mistake\n", "\\[rank0\\]:  of 0\n", "\\[rank1\\]:error: a mistake\n\\[rank1\\]:  of 1\n\\[rank1\\]:end\n"}},
        {"for i in 1 2; do echo 'error: x' >&2; done", 0, {}, {"^\\[rank0\\]:error: x\n\\[rank0\\]:error: x\n$"}, "", {}},
        // The second node of two has other ranks.
        {"await() { while [ ! -e $1 ]; do sleep 0.05; done; }; [ $RANK = 2 ] || await said.2; echo 'error: x' >&2; touch said.$RANK; await "
         "said.3; "
         "exit 2",
         2,
         {},
         {"^\\[rank2\\]:error: x\n", "; rank 3 reported an error above, too\n"},
         "[rank3]:error",
         {"--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node0"}},
    });
  });
  const auto run = launch({"--nproc-per-node", "3", "--log-dir", "logs"},
                          "sleep 0.$RANK; printf 'error: %s\n  %s\n' 'two mistakes' 'and where' >&2; sleep 1; exit 2");
  beside.join();
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.errors.find("error: two mistakes"), run.errors.rfind("error: two mistakes")) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("[rank0]:  and where\n"));
  EXPECT_THAT(run.errors, HasSubstr("; ranks 1, 2 reported an error above, too\n"));
  for (const std::string rank : {"0", "1", "2"})
    EXPECT_EQ(test::read_file(folder_ / ("logs/attempt_0/" + rank + "/stderr.log")), "error: two mistakes\n  and where\n");
}

TEST_F(LaunchTest, OnlyFailuresThatARestartMayHealGetOneUntilThreeBringNoStep) {
  const auto reports = [](const std::string& step) {
    return "python3 -c 'import os; os.pwrite(int(os.environ[\"MANTISSA_STEP_FD\"]), (" + step +
           ").to_bytes(8, \"little\"), 8*int(os.environ[\"LOCAL_RANK\"]))'; exit 6";
  };
  std::vector<Launched> all = {
      {"exit 6", 6, {}, {"restart 1 of 1"}, "", {"--max-restarts", "1"}},
      {reports("12"), 6, {}, {"no restart: 3 restarts in a row did not get beyond step 12"}, "restart 4 of 9", {"--max-restarts", "9"}},
      {reports("5 + int(os.environ[\"TORCHELASTIC_RESTART_COUNT\"])"), 6, {}, {"restart 6 of 6"}, "", {"--max-restarts", "6"}}};
  for (const int code : {1, 2, 3, 4, 5, 7, 42, 75})
    all.push_back({text("exit ", code), code, {}, {}, "restart 1", {"--max-restarts", "2"}});
  for (const std::string end : {"exit 6", "exit 70", "kill -SEGV $$", "kill -TERM $$"}) {
    all.push_back({"[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && " + end + "; sleep 30",
                   0,
                   {},
                   {"restart 2 of 2"},
                   "",
                   {"--nproc-per-node", "2", "--max-restarts", "2"}});
  }
  expect_all(all);
}

TEST_F(LaunchTest, CoresAreCounted) {
  const auto run = launch({"--nproc-per-node", "cpu"},
                          "[ $WORLD_SIZE = $(python3 -c 'import os; print(len(os.sched_getaffinity(0)))') ] && echo as many");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("[rank0]:as many\n"));
}

}  // namespace mantissa::launch_test
