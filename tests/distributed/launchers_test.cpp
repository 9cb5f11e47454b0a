// Runs that the launchers of others start, as their users do: the losses and the weights of one process. A process alone opens no socket.
#include "launched_training.h"

namespace mantissa::launchers_test {

bool runs(const std::vector<std::string>& command, const std::string& says) {
  const auto result = test::run_process(command, ".");
  return result.exit_code == 0 && (result.output + result.errors).find(says) != std::string::npos;
}

class Launchers : public test::LaunchedTraining {
 protected:
  // `launcher` starts 4 processes of what follows it.
  void expect_run_of_one(std::vector<std::string> launcher, const std::string& name) const {
    ASSERT_EQ(mantissa(train("alone")).exit_code, 0);
    launcher.emplace_back(MANTISSA_BINARY);
    for (const std::string& word : train(name)) launcher.push_back(word);
    const auto run = test::run_process(launcher, folder_.path());
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_EQ(course("alone").size(), 42U);
    EXPECT_EQ(course(name), course("alone"));
    expect_equal("alone", name);
    EXPECT_TRUE(std::filesystem::exists(folder_ / (name + "/checkpoints/step-00000040/shard-00003.safetensors"))) << "it ran on 4 ranks";
  }

  // Slurm's variables, set by hand: 4 tasks on the nodes that `step` describes, all of which are this host. What follows is the command.
  static std::vector<std::string> by_slurm(const std::string& step) {
    const std::string script =
        "export SLURM_JOB_ID=" + std::to_string(::getpid()) + " SLURM_STEP_ID=0 SLURM_NTASKS=7 SLURM_STEP_NUM_TASKS=4 " + step + R"(
      for task in 0 1 2 3; do
        SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) SLURM_NODEID=$((task / per_node)) "$@" &
        tasks="$tasks $!"
      done
      code=0
      for task in $tasks; do wait $task || code=$?; done
      exit $code)";
    return {"sh", "-c", script, "slurm"};
  }
};

TEST_F(Launchers, OpenMpi) {
  if (!runs({"mpirun", "--version"}, "Open MPI")) GTEST_SKIP() << "no mpirun of Open MPI (package openmpi-bin)";
  expect_run_of_one({"env", "OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", "mpirun", "-np", "4", "--oversubscribe"},
                    "openmpi");
}

TEST_F(Launchers, Hydra) {
  if (!runs({"mpiexec.hydra", "--version"}, "HYDRA")) GTEST_SKIP() << "no mpiexec.hydra (package mpich)";
  expect_run_of_one({"mpiexec.hydra", "-n", "4"}, "hydra");
}

TEST_F(Launchers, SlurmOnOneNode) { expect_run_of_one(by_slurm("SLURM_STEP_TASKS_PER_NODE=4 per_node=4"), "slurm"); }

// The tasks meet at the first node, at a port made from the number of the job.
TEST_F(Launchers, SlurmOnTwoNodes) {
  expect_run_of_one(by_slurm("SLURM_STEP_TASKS_PER_NODE='2(x2)' SLURM_STEP_NODELIST=localhost,localhost "
                             "MANTISSA_SECRET=0123456789abcdef0123456789abcdef per_node=2"),
                    "slurm");
}

class SystemCalls : public test::LaunchedTraining {
 protected:
  // How often `words` call socket() in all their processes and threads.
  int sockets_of(const std::vector<std::string>& words) const {
    std::vector<std::string> traced = {"strace", "-f", "-e", "trace=socket,socketpair", "-o", "calls"};
    traced.insert(traced.end(), words.begin(), words.end());
    const auto run = test::run_process(traced, folder_.path());
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    const std::string calls = test::read_file(folder_ / "calls");
    int count = 0;
    for (size_t at = calls.find("socket"); at != std::string::npos; at = calls.find("socket", at + 1)) ++count;
    return count;
  }
};

TEST_F(SystemCalls, AProcessAloneOpensNoSocket) {
  if (!runs({"strace", "-f", "-o", "/dev/null", "true"}, "")) GTEST_SKIP() << "no strace, or it may not trace";
  std::vector<std::string> alone = {MANTISSA_BINARY}, together = {MANTISSA_BINARY, "launch", "--nproc-per-node", "2", "--"};
  for (const std::string& word : train("alone")) alone.push_back(word);
  for (const std::string& word : train("together")) together.push_back(word);
  EXPECT_EQ(sockets_of(alone), 0);
  EXPECT_GT(sockets_of(together), 0) << "or nothing was traced";
}

}  // namespace mantissa::launchers_test
