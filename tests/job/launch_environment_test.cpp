// Every launcher's variables, and what is wrong with them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include "files.h"
#include "mantissa/job/launch.h"

namespace mantissa::launch_environment_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Launch launch_of(const Environment& environment) { return launch_from_environment(environment, 77); }

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

void expect_refused(const Environment& environment, const std::string& because) {
  const Error error = test::error_of([&] { launch_of(environment); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr(because));
}

const Environment kTorchrun{
    {"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "29500"}};
const Environment kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                           {"PMIX_NAMESPACE", "463732737"}};
const Environment kHydra{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const Environment kSlurm{{"SLURM_PROCID", "5"},
                         {"SLURM_NTASKS", "10"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NODEID", "1"},
                         {"SLURM_JOB_ID", "123456"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_TASKS_PER_NODE", "4(x2),2"},
                         {"SLURM_STEP_NODELIST", "n[07-08,11]"}};

TEST(LaunchEnvironment, NothingIsAProcessAlone) {
  const Launch alone = launch_of({{"PATH", "/bin"}});
  EXPECT_EQ(alone.world, 1);
  EXPECT_EQ(alone.rank, 0);
  EXPECT_EQ(alone.local_size, 1);
  EXPECT_EQ(describe(alone), "one rank, started by a process alone");
}

TEST(LaunchEnvironment, TorchrunNamesAllOfIt) {
  const Launch launch = launch_of(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "2"}, {"TORCHELASTIC_RUN_ID", "job"}}));
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 4);
  EXPECT_EQ(launch.address, "node0");
  EXPECT_EQ(launch.port, 29500);
  EXPECT_EQ(launch.restart, 2);
  EXPECT_EQ(launch.job, "job");
  EXPECT_THAT(describe(launch),
              HasSubstr("rank 5 of 8 (1 of 4 on this host), started by torchrun (RANK, WORLD_SIZE), rendezvous at node0:29500"));
}

TEST(LaunchEnvironment, TorchrunsOwnStoreHasThePortBeforeOurs) {
  EXPECT_EQ(launch_of(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).port, 29501);
  EXPECT_EQ(launch_of(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "False"}})).port, 29500);
  expect_refused(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"MASTER_PORT", "65535"}}), "MASTER_PORT=65535");
}

TEST(LaunchEnvironment, RanksByHandOnLoopbackAreOnOneHost) {
  const Launch launch = launch_of({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "4000"}});
  EXPECT_EQ(launch.local_rank, 3);
  EXPECT_EQ(launch.local_size, 4);
  const Launch elsewhere = launch_of({{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "4000"}});
  EXPECT_EQ(elsewhere.local_size, 1);
}

TEST(LaunchEnvironment, MpiOnOneHostMeetsByItsJob) {
  const Launch open_mpi = launch_of(kOpenMpi);
  EXPECT_EQ(open_mpi.rank, 1);
  EXPECT_EQ(open_mpi.local_size, 2);
  EXPECT_EQ(open_mpi.port, 0);
  EXPECT_EQ(open_mpi.job, "openmpi-463732737");
  const Launch hydra = launch_of(kHydra);
  EXPECT_EQ(hydra.world, 2);
  EXPECT_EQ(hydra.port, 0);
  EXPECT_EQ(hydra.job, "parent-77");
}

TEST(LaunchEnvironment, MpiOnSeveralHostsNeedsThePlace) {
  const Environment two_hosts = with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "4"}});
  expect_refused(two_hosts, "-x MASTER_ADDR=HOST -x MASTER_PORT=PORT");
  const Launch launch = launch_of(with(two_hosts, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "99"}}));
  EXPECT_EQ(launch.address, "a");
  EXPECT_EQ(launch.port, 99);
  expect_refused({{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}}, "MASTER_ADDR");
}

// The name enters the proof, and the launcher's processes on two hosts have two numbers.
TEST(LaunchEnvironment, ParentNamesNoJobThatMeetsAtAPort) {
  Environment unnamed = kOpenMpi;
  unnamed.erase("PMIX_NAMESPACE");
  for (const Environment& one_host : {unnamed, kHydra}) {
    EXPECT_EQ(launch_of(one_host).job, "parent-77");
    EXPECT_EQ(launch_of(with(one_host, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "99"}})).job, "");
  }
  EXPECT_EQ(launch_of(with(kOpenMpi, {{"MASTER_ADDR", "a"}, {"MASTER_PORT", "99"}})).job, "openmpi-463732737");
}

TEST(LaunchEnvironment, SlurmNeedsAStep) {
  Environment allocation = kSlurm;
  allocation.erase("SLURM_STEP_ID");
  EXPECT_EQ(launch_of(allocation).world, 1) << "a shell in an interactive allocation";
  const Launch launch = launch_of(kSlurm);
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.world, 10);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 4);
  EXPECT_EQ(launch.address, "n07");
  EXPECT_EQ(launch.port, 10000 + 123456 % 20000);
}

TEST(LaunchEnvironment, SlurmSaysHowOftenItStartedTheJobAnew) {
  EXPECT_EQ(launch_of(kSlurm).restart, 0);
  EXPECT_EQ(launch_of(with(kSlurm, {{"SLURM_RESTART_COUNT", "3"}})).restart, 3);
  expect_refused(with(kSlurm, {{"SLURM_RESTART_COUNT", "-1"}}), "SLURM_RESTART_COUNT");
}

TEST(LaunchEnvironment, SlurmsNodesHaveTasksOfTheirOwn) {
  const Environment last = with(kSlurm, {{"SLURM_PROCID", "9"}, {"SLURM_NODEID", "2"}, {"SLURM_LOCALID", "1"}});
  const Launch launch = launch_of(last);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.local_size, 2);
  expect_refused(with(last, {{"SLURM_LOCALID", "2"}}), "SLURM_LOCALID");
}

TEST(LaunchEnvironment, SlurmOnOneHostMeetsByItsStep) {
  const Launch launch =
      launch_of(with(kSlurm, {{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "3"}, {"SLURM_LOCALID", "3"}, {"SLURM_STEP_TASKS_PER_NODE", "4"}}));
  EXPECT_EQ(launch.local_size, 4);
  EXPECT_EQ(launch.port, 0);
  EXPECT_EQ(launch.job, "slurm-123456-0");
}

TEST(LaunchEnvironment, SlurmsStepOverridesItsJob) {
  EXPECT_EQ(launch_of(with(kSlurm, {{"SLURM_NTASKS", "40"}, {"SLURM_STEP_NUM_TASKS", "10"}})).world, 10);
  Environment job_list = with(kSlurm, {{"SLURM_JOB_NODELIST", "other"}});
  EXPECT_EQ(launch_of(job_list).address, "n07");
  job_list.erase("SLURM_STEP_NODELIST");
  EXPECT_EQ(launch_of(job_list).address, "other");
}

TEST(LaunchEnvironment, TheFirstOfTheListIsBelieved) {
  Environment all = with(with(with(kTorchrun, kOpenMpi), kHydra), kSlurm);
  EXPECT_THAT(launch_of(all).launcher, HasSubstr("torchrun"));
  all.erase("RANK");
  all.erase("WORLD_SIZE");
  EXPECT_EQ(launch_of(all).launcher, "Open MPI");
  for (const auto& [name, value] : kOpenMpi) all.erase(name);
  EXPECT_EQ(launch_of(all).launcher, "MPICH");
  all.erase("MPI_LOCALRANKID");
  EXPECT_EQ(launch_of(all).launcher, "Slurm") << "srun with PMI2 sets PMI_RANK, too";
}

TEST(LaunchEnvironment, HalfOfAPairIsRefused) {
  expect_refused({{"RANK", "0"}}, "RANK=0 is set, and WORLD_SIZE is not");
  expect_refused({{"WORLD_SIZE", "2"}}, "WORLD_SIZE=2 is set, and RANK is not");
  expect_refused({{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not");
  expect_refused({{"PMI_SIZE", "2"}}, "PMI_RANK is not");
  for (const std::string name : {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    Environment half = kTorchrun;
    half.erase(name);
    expect_refused(half, name);
  }
  for (const std::string name : {"SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE"}) {
    Environment half = kSlurm;
    half.erase(name);
    expect_refused(half, name);
  }
}

TEST(LaunchEnvironment, EveryNumberHasARange) {
  const std::vector<std::string> never = {"", " 1", "1 ", "+1", "-1", "1.5", "0x1", "1e1", "abc", "99999999999999999999", "1\n", "65537"};
  for (const std::string& value : never) {
    for (const std::string name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}) {
      expect_refused(with(kTorchrun, {{name, value}}), name);
    }
    expect_refused(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", value}}), "OMPI_COMM_WORLD_RANK");
    expect_refused(with(kHydra, {{"MPI_LOCALNRANKS", value}}), "MPI_LOCALNRANKS");
    expect_refused(with(kSlurm, {{"SLURM_LOCALID", value}}), "SLURM_LOCALID");
  }
  expect_refused(with(kTorchrun, {{"RANK", "8"}}), "RANK=8: must be below WORLD_SIZE=8");
  expect_refused(with(kTorchrun, {{"LOCAL_RANK", "4"}}), "LOCAL_RANK=4: must be below LOCAL_WORLD_SIZE=4");
  expect_refused(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), "LOCAL_WORLD_SIZE=9: more than WORLD_SIZE=8");
  expect_refused(with(kTorchrun, {{"WORLD_SIZE", "0"}}), "WORLD_SIZE");
  expect_refused(with(kTorchrun, {{"MASTER_PORT", "0"}}), "MASTER_PORT");
  expect_refused(with(kTorchrun, {{"MASTER_ADDR", ""}}), "MASTER_ADDR: is empty");
  expect_refused(with(kTorchrun, {{"TORCHELASTIC_RESTART_COUNT", "-1"}}), "TORCHELASTIC_RESTART_COUNT");
  expect_refused(with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}}), "does not sum to the 10 tasks");
  expect_refused(with(kSlurm, {{"SLURM_NODEID", "3"}}), "SLURM_NODEID");
}

TEST(LaunchEnvironment, AWorldOfOneNeedsNoPlace) {
  EXPECT_EQ(launch_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}}).world, 1);
  EXPECT_EQ(launch_of({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).world, 1);
}

// mpirun and srun bind a rank to its own cores, which it need not divide again.
TEST(LaunchEnvironment, RankTakesItsPartOfTheCores) {
  Launch launch;
  launch.world = launch.local_size = 4;
  EXPECT_EQ(threads_of_rank(launch, 16, 16), 4);
  EXPECT_EQ(threads_of_rank(launch, 4, 16), 4) << "bound to its part";
  EXPECT_EQ(threads_of_rank(launch, 1, 16), 1);
  EXPECT_EQ(threads_of_rank(launch, 8, 16), 4) << "bound to a half, which it shares";
  EXPECT_EQ(threads_of_rank(launch, 3, 3), 1) << "more ranks than cores";
  launch.world = 64;
  EXPECT_EQ(threads_of_rank(launch, 16, 16), 4) << "those of other hosts have cores there";
}

TEST(LaunchEnvironment, SlurmsHostLists) {
  const auto first = [](const std::string& list) { return first_host("LIST", list); };
  EXPECT_EQ(first("n1"), "n1");
  EXPECT_EQ(first("n[01-04,7],m"), "n01");
  EXPECT_EQ(first("n7,n[01-04]"), "n7");
  EXPECT_EQ(first("rack[2,5]node[003-9]-ib.local"), "rack2node003-ib.local");
  for (const std::string bad : {"", "n[", "n[]", "n[-1]", "n[a]", "n]", "n 1", "n[1]\n", "[", ",n", "n/../x", "$(reboot)"}) {
    const Error error = test::error_of([&] { first(bad); });
    EXPECT_EQ(error.code(), ExitCode::usage) << bad;
    EXPECT_THAT(error.what(), HasSubstr("LIST="));
  }
  EXPECT_EQ(test::error_of([&] { first(std::string(300, 'n')); }).code(), ExitCode::usage);
}

TEST(LaunchEnvironment, SlurmsTaskLists) {
  const auto tasks = [](const std::string& list) { return tasks_per_node("LIST", list); };
  EXPECT_THAT(tasks("3"), ElementsAre(3));
  EXPECT_THAT(tasks("4(x2),2"), ElementsAre(4, 4, 2));
  EXPECT_THAT(tasks("1,2(x1),3"), ElementsAre(1, 2, 3));
  for (const std::string bad :
       {"", ",", "4,", ",4", "0", "-1", "4(x)", "4(x0)", "4(x-1)", "(x2)", "4(2)", "4(x2", "4x2", "1(x99999999)", "1(x65536),1"}) {
    EXPECT_EQ(test::error_of([&] { tasks(bad); }).code(), ExitCode::usage) << bad;
  }
}

// What rank 1 of three leaves in that file when rank 6 ended it.
int64_t reported_cause(int fd) {
  const std::vector<std::pair<const char*, std::string>> variables = {
      {"MANTISSA_STEP_FD", std::to_string(fd)}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "3"}};
  for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
  report_cause(6);
  for (const auto& [name, value] : variables) ::unsetenv(name);
  int64_t number = 0;
  return ::pread(fd, &number, sizeof number, (3 + 1) * sizeof number) == static_cast<ssize_t>(sizeof number) ? number : -1;
}

TEST(LaunchEnvironment, ACauseIsReportedBehindTheStepsOfAllRanks) {
  const int fd = ::memfd_create(kReportsName, 0);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(reported_cause(fd), 7);
  ::close(fd);
  report_cause(6);  // nobody to be told
}

// A process inherits the variable, but not the descriptor, and opens a file of its own there.
TEST(LaunchEnvironment, NothingIsReportedIntoAnotherFile) {
  const test::TemporaryFolder folder;
  for (const int fd : {::open((folder / "metrics.jsonl").c_str(), O_RDWR | O_CREAT, 0600), ::memfd_create("other", 0)}) {
    ASSERT_GE(fd, 0);
    EXPECT_EQ(reported_cause(fd), -1);
    EXPECT_EQ(::lseek(fd, 0, SEEK_END), 0);
    ::close(fd);
    EXPECT_EQ(reported_cause(fd), -1) << "closed";
  }
}

TEST(LaunchEnvironment, TheOwnLauncherIsNamed) {
  Environment environment = {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}};
  EXPECT_EQ(launch_from_environment(environment).launcher, "torchrun (RANK, WORLD_SIZE)");
  environment["MANTISSA_STEP_FD"] = "5";
  EXPECT_EQ(launch_from_environment(environment).launcher, "mantissa launch (RANK, WORLD_SIZE)");
}

}  // namespace mantissa::launch_environment_test
