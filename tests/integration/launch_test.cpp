// mantissa launch with small commands: what workers are told, what is shown, how it ends, when it starts again.
#include <gmock/gmock.h>
#include <signal.h>

#include <regex>

#include "launcher.h"

namespace mantissa::launch_test {

using test::Clock;
using test::eventually;
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
  std::smatch port, secret;
  for (const std::string option : {"--standalone", "--nproc-per-node=1"}) {
    const auto run = launch({option}, "echo port $MASTER_PORT token $MANTISSA_SECRET addr $MASTER_ADDR omp [$OMP_NUM_THREADS]");
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_THAT(run.output, ContainsRegex("port [0-9]+ token [0-9a-f]{64} addr 127.0.0.1 omp \\[\\]"));
    EXPECT_THAT(run.output, Not(HasSubstr("port 29500")));
  }
  EXPECT_THAT(launch({"--master-port", "4444"}, "echo $MASTER_PORT").output, HasSubstr("[rank0]:4444\n"));
}

// Whatever the launcher blocks or ignores itself, and whatever was blocked when it was started.
TEST_F(LaunchTest, CommandsGetACleanMaskOfSignals) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto run = launch({}, "grep -E '^Sig(Blk|Ign)' /proc/self/status");
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("[rank0]:SigBlk:\t0000000000000000\n"));
  EXPECT_THAT(run.output, HasSubstr("[rank0]:" + test::run_process({"grep", "^SigIgn", "/proc/self/status"}, folder_.path()).output));
}

TEST_F(LaunchTest, AnIgnoredHangupIsIgnoredByAll) {
  const std::string script = "grep SigIgn /proc/self/status; kill -HUP $PPID; sleep 0.2; exit $((70 * (1 - TORCHELASTIC_RESTART_COUNT)))";
  const auto run = test::run_process(
      {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh", MANTISSA_BINARY, "launch", "--max-restarts", "1", "--", "sh", "-c", script},
      folder_.path());
  EXPECT_THAT(run.output, ContainsRegex("SigIgn:\t000000000000000[1357]\n")) << "a job in the background ignores SIGINT and SIGQUIT, too";
  EXPECT_EQ(run.exit_code, 0) << "nobody asked for an end, so it is started again\n" << run.errors;
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

TEST_F(LaunchTest, WhatIsNoErrorOrWasNotShownIsNotHeldBack) {
  const auto table = launch({"--nproc-per-node", "2"}, "printf 'a table\n  of rows\n' >&2");
  for (const int rank : {0, 1}) EXPECT_THAT(table.errors, HasSubstr(text("[rank", rank, "]:a table\n[rank", rank, "]:  of rows\n")));
  const auto hidden = launch({"--nproc-per-node", "2", "--ranks-filter", "1"}, "sleep 0.$RANK; echo 'error: x' >&2");
  EXPECT_EQ(hidden.errors, "[rank1]:error: x\n");
}

TEST_F(LaunchTest, AnErrorOfSeveralRanksIsShownOnce) {
  const auto run = launch({"--nproc-per-node", "3", "--log-dir", "logs"},
                          "sleep 0.$RANK; printf 'error: %s\n  %s\n' 'two mistakes' 'and where' >&2; sleep 1; exit 2");
  EXPECT_EQ(run.exit_code, 2);
  EXPECT_EQ(run.errors.find("error: two mistakes"), run.errors.rfind("error: two mistakes")) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("[rank0]:  and where\n"));
  EXPECT_THAT(run.errors, HasSubstr("; an error above is also that of ranks 1, 2\n"));
  for (const std::string rank : {"0", "1", "2"})
    EXPECT_EQ(test::read_file(folder_ / ("logs/attempt_0/" + rank + "/stderr.log")), "error: two mistakes\n  and where\n");
  const auto other = launch({"--nproc-per-node", "2"}, "sleep 0.$RANK; printf 'error: a mistake\n  of %s\nend\n' $RANK >&2; sleep 0.3");
  for (const std::string line :
       {"[rank0]:error: a mistake\n", "[rank0]:  of 0\n", "[rank1]:error: a mistake\n[rank1]:  of 1\n[rank1]:end\n"})
    EXPECT_THAT(other.errors, HasSubstr(line));
  const auto again = launch({}, "for i in 1 2; do echo 'error: x' >&2; done");
  EXPECT_EQ(again.errors, "[rank0]:error: x\n[rank0]:error: x\n") << "one rank may repeat itself";
}

TEST_F(LaunchTest, OnlyFailuresThatARestartMayHealGetOne) {
  for (const int code : {1, 2, 3, 4, 5, 7, 42, 75}) {
    const auto run = launch({"--max-restarts", "2"}, "echo attempt; exit " + std::to_string(code));
    EXPECT_EQ(run.exit_code, code);
    EXPECT_EQ(run.output, "[rank0]:attempt\n") << code;
  }
  for (const std::string end : {"exit 6", "exit 70", "kill -SEGV $$", "kill -TERM $$"}) {
    const auto run = launch({"--nproc-per-node", "2", "--max-restarts", "2"},
                            "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && " + end + "; sleep 30");
    EXPECT_EQ(run.exit_code, 0) << end << run.errors;
    EXPECT_THAT(run.errors, HasSubstr("restart 2 of 2"));
  }
  const auto used_up = launch({"--max-restarts", "1"}, "exit 6");
  EXPECT_EQ(used_up.exit_code, 6);
  EXPECT_THAT(used_up.errors, HasSubstr("restart 1 of 1"));
}

TEST_F(LaunchTest, RestartsWithoutANewStepEnd) {
  const std::string report =
      "python3 -c 'import os; os.pwrite(int(os.environ[\"MANTISSA_STEP_FD\"]), (STEP).to_bytes(8, \"little\"), "
      "8*int(os.environ[\"LOCAL_RANK\"]))'; exit 6";
  const auto with_step = [&](const std::string& step) { return std::regex_replace(report, std::regex("STEP\\)"), step + ")"); };
  const auto stuck = launch({"--max-restarts", "9"}, with_step("12"));
  EXPECT_EQ(stuck.exit_code, 6);
  EXPECT_THAT(stuck.errors, HasSubstr("no restart: 3 brought no step after 12"));
  EXPECT_THAT(stuck.errors, Not(HasSubstr("restart 4 of 9")));
  const auto moving = launch({"--max-restarts", "6"}, with_step("5 + int(os.environ[\"TORCHELASTIC_RESTART_COUNT\"])"));
  EXPECT_EQ(moving.exit_code, 6);
  EXPECT_THAT(moving.errors, HasSubstr("restart 6 of 6"));
}

TEST_F(LaunchTest, SignalsAreHandedOnAndEndWithoutRestart) {
  for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
    const auto run = disturbed(2, "trap 'echo asked; exit 75' TERM INT HUP QUIT USR1 USR2; touch ready.$RANK; while :; do sleep 0.05; done",
                               [&](pid_t launcher) { ::kill(launcher, signal); });
    EXPECT_EQ(run.exit_code, 75) << signal << run.errors;
    EXPECT_THAT(run.output, HasSubstr("[rank0]:asked\n"));
    EXPECT_THAT(run.output, HasSubstr("[rank1]:asked\n"));
    EXPECT_THAT(run.errors, Not(HasSubstr("mantissa launch"))) << "nothing failed";
  }
  const auto dead = disturbed(2, "touch ready.$RANK; exec sleep 30", [](pid_t launcher) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(dead.exit_code, 128 + SIGTERM);
}

// A peer that left first makes a worker's answer to the signal a 6.
TEST_F(LaunchTest, WhoWasAskedToStopIsNotStartedAgain) {
  for (const std::string end : {"exit 6", "exit 70", "kill -9 $$"}) {
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1}) {
      const auto run = disturbed(
          2,
          "[ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; trap '" + end +
              "' TERM INT HUP QUIT USR1; touch ready.$RANK; while :; do sleep 0.05; done",
          [&](pid_t launcher) { ::kill(launcher, signal); }, 2);
      EXPECT_EQ(run.exit_code, end == "exit 6" ? 6 : end == "exit 70" ? 70 : 137) << signal << run.errors;
      EXPECT_THAT(run.errors, Not(HasSubstr("restart 1 of 2"))) << signal;
    }
  }
  const auto saved = disturbed(
      1, "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; trap 'exit 6' USR2; touch ready.$RANK; while :; do sleep 0.05; done",
      [](pid_t launcher) { ::kill(launcher, SIGUSR2); }, 2);
  EXPECT_EQ(saved.exit_code, 0) << "SIGUSR2 asks for a save, and not for an end" << saved.errors;
}

TEST_F(LaunchTest, SecondInterruptKillsAtOnce) {
  const auto start = Clock::now();
  const auto run = disturbed(2, "trap '' INT TERM; touch ready.$RANK; while :; do sleep 0.05; done", [&](pid_t launcher) {
    ::kill(launcher, SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ::kill(launcher, SIGINT);
  });
  EXPECT_EQ(run.exit_code, 130);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(25)) << "and not after the grace of 30 s";
}

TEST_F(LaunchTest, NobodyOutlivesAKilledLauncher) {
  std::vector<pid_t> workers;
  const auto run = disturbed(3, "echo $$ > pid.$RANK; touch ready.$RANK; exec sleep 1000", [&](pid_t launcher) {
    for (int rank = 0; rank < 3; ++rank) workers.push_back(std::stoi(test::read_file(folder_ / ("pid." + std::to_string(rank)))));
    ::kill(launcher, SIGKILL);
  });
  EXPECT_EQ(run.exit_code, 137);
  for (const pid_t worker : workers) {
    EXPECT_TRUE(eventually([&] { return !std::filesystem::exists("/proc/" + std::to_string(worker) + "/exe") || ::kill(worker, 0) != 0; }));
  }
}

TEST_F(LaunchTest, WhatAWorkerLeavesBehindGoesWithIt) {
  const auto run = launch({"--nproc-per-node", "2"}, "sleep 1000 & echo $! > child.$RANK; exit 0");
  EXPECT_EQ(run.exit_code, 0);
  for (const std::string rank : {"0", "1"}) {
    const pid_t child = std::stoi(test::read_file(folder_ / ("child." + rank)));
    EXPECT_TRUE(eventually([&] { return ::kill(child, 0) != 0 || !std::filesystem::exists("/proc/" + std::to_string(child) + "/exe"); }));
  }
}

TEST_F(LaunchTest, CoresAreCounted) {
  const auto run = launch({"--nproc-per-node", "cpu"},
                          "[ $WORLD_SIZE = $(python3 -c 'import os; print(len(os.sched_getaffinity(0)))') ] && echo as many");
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("[rank0]:as many\n"));
}

}  // namespace mantissa::launch_test
