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
    launcher.emplace_back(MANTISSA_BINARY);
    for (const std::string& word : train(name)) launcher.push_back(word);
    const auto run = test::run_process(launcher, folder_.path());
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_EQ(course(alone()).size(), 42U);
    EXPECT_EQ(course(name), course(alone()));
    expect_equal(alone(), name);
    EXPECT_TRUE(std::filesystem::exists(folder_ / (name + "/checkpoints/step-00000040/shard-00003.safetensors"))) << "it ran on 4 ranks";
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

// Slurm's variables, set by hand: 4 tasks on two nodes, both of which are this host, meet at the first one, at a port made from the number
// of the job.
TEST_F(Launchers, SlurmOnTwoNodes) {
  const std::string script = "export SLURM_JOB_ID=" + std::to_string(::getpid()) + R"( SLURM_STEP_ID=0 SLURM_NTASKS=7 SLURM_STEP_NUM_TASKS=4
      export SLURM_STEP_TASKS_PER_NODE='2(x2)' SLURM_STEP_NODELIST=localhost,localhost MANTISSA_SECRET=0123456789abcdef0123456789abcdef
      for task in 0 1 2 3; do
        SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) "$@" &
        tasks="$tasks $!"
      done
      code=0
      for task in $tasks; do wait $task || code=$?; done
      exit $code)";
  expect_run_of_one({"sh", "-c", script, "slurm"}, "slurm");
}

TEST_F(Launchers, AProcessAloneOpensNoSocket) {
  if (!runs({"strace", "-f", "-o", "/dev/null", "true"}, "")) GTEST_SKIP() << "no strace, or it may not trace";
  for (const int ranks : {1, 2}) {
    std::vector<std::string> words = {"strace", "-f", "-e", "trace=socket,socketpair", "-o", "calls", MANTISSA_BINARY};
    if (ranks > 1) words.insert(words.end(), {"launch", "--nproc-per-node", "2", "--"});
    for (const std::string& word : train("traced", {"--set", "training.steps=2"})) words.push_back(word);
    const auto run = test::run_process(words, folder_.path());
    EXPECT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_EQ(test::read_file(folder_ / "calls").find("socket") == std::string::npos, ranks == 1) << "by two, or nothing was traced";
    std::filesystem::remove_all(folder_ / "traced");
  }
}

}  // namespace mantissa::launchers_test
