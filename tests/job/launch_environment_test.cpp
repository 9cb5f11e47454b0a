// Every launcher's variables, and errors in them.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <sstream>

#include "files.h"
#include "job/launch.h"

namespace mantissa::launch_environment_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// "A=1 B=2 -A" has B alone.
Environment environment_of(const std::string& list) {
  Environment out;
  std::istringstream words(list);
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (word[0] == '-')
      out.erase(word.substr(1));
    else
      out[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return out;
}

// The description of a launch and its job, or the error.
std::string told(const Environment& environment) {
  try {
    const Launch launch = launch_from_environment(environment, 77);
    return describe(launch) + (launch.job.empty() ? "" : ", job " + launch.job);
  } catch (const Error& error) {
    return text(static_cast<int>(error.code()), ": ", error.what());
  }
}

const std::string kTorchrun = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500 ";
const std::string kOpenMpi =
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=463 ";
const std::string kHydra = "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2 ";
const std::string kSlurm =
    "SLURM_PROCID=5 SLURM_NTASKS=10 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_JOB_ID=123456 SLURM_STEP_ID=0 "
    "SLURM_STEP_TASKS_PER_NODE=4(x2),2 SLURM_STEP_NODELIST=n[07-08,11] ";
const std::string kMaster = "MASTER_ADDR=a MASTER_PORT=99 ", kAlone = "one rank, started by a process alone";
const std::string kLastNode = kSlurm + "SLURM_PROCID=9 SLURM_NODEID=2 ", kAll = kTorchrun + kOpenMpi + kHydra + kSlurm;

struct Case {
  std::string environment, told;
};

const std::vector<Case> kLaunches = {
    {"PATH=/bin", kAlone},
    {kTorchrun + "TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=j",
     "rank 5 of 8 (1 of 4 on this host), started by torchrun (RANK, WORLD_SIZE), rendezvous at node0:29500, restart 2, job j"},
    {kTorchrun + "TORCHELASTIC_USE_AGENT_STORE=True",  // its own store has the port before
     "rank 5 of 8 (1 of 4 on this host), started by torchrun (RANK, WORLD_SIZE), rendezvous at node0:29501"},
    {kTorchrun + "TORCHELASTIC_USE_AGENT_STORE=False MANTISSA_STEP_FD=5",
     "rank 5 of 8 (1 of 4 on this host), started by mantissa launch (RANK, WORLD_SIZE), rendezvous at node0:29500"},
    // RANK and WORLD_SIZE are set by hand: on loopback all ranks are on one host.
    {"RANK=3 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=4000",
     "rank 3 of 4 (3 of 4 on this host), started by torchrun (RANK, WORLD_SIZE), rendezvous at 127.0.0.1:4000"},
    {"RANK=3 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=4000",
     "rank 3 of 4 (0 of 1 on this host), started by torchrun (RANK, WORLD_SIZE), rendezvous at 10.0.0.1:4000"},
    {"RANK=0 WORLD_SIZE=1", "one rank, started by torchrun (RANK, WORLD_SIZE)"},
    // A parent names no job that meets at a port: the launcher's processes on two hosts have two numbers.
    {kOpenMpi, "rank 1 of 2 (1 of 2 on this host), started by Open MPI, rendezvous on this host, job openmpi-463"},
    {kOpenMpi + kMaster, "rank 1 of 2 (1 of 2 on this host), started by Open MPI, rendezvous at a:99, job openmpi-463"},
    {kOpenMpi + "OMPI_COMM_WORLD_SIZE=4 " + kMaster,
     "rank 1 of 4 (1 of 2 on this host), started by Open MPI, rendezvous at a:99, job openmpi-463"},
    {kOpenMpi + "-PMIX_NAMESPACE", "rank 1 of 2 (1 of 2 on this host), started by Open MPI, rendezvous on this host, job parent-77"},
    {kOpenMpi + "-PMIX_NAMESPACE " + kMaster, "rank 1 of 2 (1 of 2 on this host), started by Open MPI, rendezvous at a:99"},
    {kHydra, "rank 0 of 2 (0 of 2 on this host), started by MPICH, rendezvous on this host, job parent-77"},
    {kHydra + kMaster, "rank 0 of 2 (0 of 2 on this host), started by MPICH, rendezvous at a:99"},
    {"PMI_RANK=0 PMI_SIZE=1", "one rank, started by MPICH"},
    // A shell in an interactive allocation has no step. Values of the step precede those of the job.
    {kSlurm + "-SLURM_STEP_ID", kAlone},
    {kSlurm, "rank 5 of 10 (1 of 4 on this host), started by Slurm, rendezvous at n07:13456, job slurm-123456-0"},
    {kSlurm + "SLURM_NTASKS=40 SLURM_STEP_NUM_TASKS=10 SLURM_JOB_NODELIST=other SLURM_RESTART_COUNT=3",
     "rank 5 of 10 (1 of 4 on this host), started by Slurm, rendezvous at n07:13456, restart 3, job slurm-123456-0"},
    {kSlurm + "SLURM_JOB_NODELIST=other -SLURM_STEP_NODELIST",
     "rank 5 of 10 (1 of 4 on this host), started by Slurm, rendezvous at other:13456, job slurm-123456-0"},
    {kLastNode, "rank 9 of 10 (1 of 2 on this host), started by Slurm, rendezvous at n07:13456, job slurm-123456-0"},
    {kSlurm + "SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_LOCALID=3 SLURM_STEP_TASKS_PER_NODE=4",
     "rank 3 of 4 (3 of 4 on this host), started by Slurm, rendezvous on this host, job slurm-123456-0"},
    // The first of the list is believed; srun with PMI2 sets PMI_RANK, too.
    {kAll, "rank 5 of 8 (1 of 4 on this host), started by torchrun (RANK, WORLD_SIZE), rendezvous at node0:29500"},
    {kAll + "-RANK -WORLD_SIZE", "rank 1 of 2 (1 of 2 on this host), started by Open MPI, rendezvous at node0:29500, job openmpi-463"},
    {kHydra + kSlurm, "rank 0 of 2 (0 of 2 on this host), started by MPICH, rendezvous on this host, job parent-77"},
    {kHydra + kSlurm + "-MPI_LOCALRANKID",
     "rank 5 of 10 (1 of 4 on this host), started by Slurm, rendezvous at n07:13456, job slurm-123456-0"},
};

const std::vector<Case> kRefused = {
    {"RANK=0", "RANK=0 is set, and WORLD_SIZE is not"},
    {"WORLD_SIZE=2", "WORLD_SIZE=2 is set, and RANK is not"},
    {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not"},
    {"PMI_SIZE=2", "PMI_RANK is not"},
    {kOpenMpi + "OMPI_COMM_WORLD_SIZE=4", "-x MASTER_ADDR=HOST -x MASTER_PORT=PORT"},
    {"PMI_RANK=0 PMI_SIZE=2", "MASTER_ADDR"},
    {kTorchrun + "RANK=8", "RANK=8: must be below WORLD_SIZE=8"},
    {kTorchrun + "LOCAL_RANK=4", "LOCAL_RANK=4: must be below LOCAL_WORLD_SIZE=4"},
    {kTorchrun + "LOCAL_WORLD_SIZE=9", "LOCAL_WORLD_SIZE=9: more than WORLD_SIZE=8"},
    {kTorchrun + "WORLD_SIZE=0", "WORLD_SIZE"},
    {kTorchrun + "MASTER_PORT=0", "MASTER_PORT"},
    {kTorchrun + "MASTER_ADDR=", "MASTER_ADDR: is empty"},
    {kTorchrun + "TORCHELASTIC_RESTART_COUNT=-1", "TORCHELASTIC_RESTART_COUNT"},
    {kTorchrun + "TORCHELASTIC_USE_AGENT_STORE=True MASTER_PORT=65535", "MASTER_PORT=65535"},
    {kSlurm + "SLURM_RESTART_COUNT=-1", "SLURM_RESTART_COUNT"},
    {kSlurm + "SLURM_STEP_TASKS_PER_NODE=4(x2)", "does not sum to the 10 tasks"},
    {kSlurm + "SLURM_NODEID=3", "SLURM_NODEID"},
    {kLastNode + "SLURM_LOCALID=2", "SLURM_LOCALID"},
};

TEST(LaunchEnvironment, EveryLauncherIsUnderstood) {
  for (const auto& [environment, expected] : kLaunches) EXPECT_EQ(told(environment_of(environment)), expected) << environment;
}

TEST(LaunchEnvironment, MistakesAreNamed) {
  const auto expect_refused = [](const Environment& environment, const std::string& why) {
    EXPECT_THAT(told(environment), AllOf(::testing::StartsWith("2: "), HasSubstr(why)));
  };
  for (const auto& [environment, why] : kRefused) expect_refused(environment_of(environment), why);
  const std::vector<std::pair<std::string, std::vector<std::string>>> needed = {
      {kTorchrun, {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}},
      {kSlurm, {"SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE"}}};
  for (const auto& [list, names] : needed) {
    for (const std::string& name : names) expect_refused(environment_of(list + "-" + name), name);
  }
  const std::vector<std::pair<std::string, std::vector<std::string>>> numbers = {
      {kTorchrun, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"}},
      {kOpenMpi, {"OMPI_COMM_WORLD_RANK"}},
      {kHydra, {"MPI_LOCALNRANKS"}},
      {kSlurm, {"SLURM_LOCALID"}}};
  for (const auto& [list, names] : numbers) {
    for (const std::string& name : names) {
      for (const char* value : {"", " 1", "1 ", "+1", "-1", "1.5", "0x1", "1e1", "abc", "99999999999999999999", "1\n", "65537"}) {
        Environment environment = environment_of(list);
        environment[name] = value;
        expect_refused(environment, name);
      }
    }
  }
}

// mpirun and srun bind a rank to its own cores, which it need not divide again.
TEST(LaunchEnvironment, RankTakesItsPartOfTheCores) {
  Launch launch;
  launch.world = 64;  // ranks of other hosts have cores there
  launch.local_size = 4;
  EXPECT_EQ(threads_of_rank(launch, 16, 16), 4);
  EXPECT_EQ(threads_of_rank(launch, 1, 16), 1) << "bound to a part";
  EXPECT_EQ(threads_of_rank(launch, 8, 16), 4) << "bound to a half, which it shares";
  EXPECT_EQ(threads_of_rank(launch, 3, 3), 1) << "more ranks than cores";
}

TEST(LaunchEnvironment, SlurmsLists) {
  for (const auto& [list, host] : std::vector<Case>{
           {"n1", "n1"}, {"n[01-04,7],m", "n01"}, {"n7,n[01-04]", "n7"}, {"rack[2,5]node[003-9]-ib.local", "rack2node003-ib.local"}}) {
    EXPECT_EQ(first_host("LIST", list), host);
  }
  for (const std::string& bad :
       {std::string(), std::string("n["), std::string("n[]"), std::string("n[-1]"), std::string("n[a]"), std::string("n]"),
        std::string("n 1"), std::string("n[1]\n"), std::string("["), std::string(",n"), std::string("n/../x"), std::string(300, 'n')}) {
    const Error error = test::error_of([&] { first_host("LIST", bad); });
    EXPECT_EQ(error.code(), ExitCode::usage) << bad;
    EXPECT_THAT(error.what(), HasSubstr("LIST="));
  }
  EXPECT_THAT(tasks_per_node("LIST", "3"), ElementsAre(3));
  EXPECT_THAT(tasks_per_node("LIST", "4(x2),2,1(x1)"), ElementsAre(4, 4, 2, 1));
  for (const char* bad :
       {"", ",", "4,", ",4", "0", "-1", "4(x)", "4(x0)", "4(x-1)", "(x2)", "4(2)", "4(x2", "4x2", "1(x99999999)", "1(x65536),1"}) {
    EXPECT_EQ(test::error_of([&] { tasks_per_node("LIST", bad); }).code(), ExitCode::usage) << bad;
  }
}

// Returns the cause that rank 1 of three leaves in that file when rank 6 ended it, behind the steps of all.
int64_t reported_cause(int fd) {
  const std::vector<std::pair<const char*, std::string>> variables = {
      {"MANTISSA_STEP_FD", std::to_string(fd)}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "3"}};
  for (const auto& [name, value] : variables) ::setenv(name, value.c_str(), 1);
  report_cause(6);
  for (const auto& [name, value] : variables) ::unsetenv(name);
  int64_t number = 0;
  return ::pread(fd, &number, sizeof number, (3 + 1) * sizeof number) == static_cast<ssize_t>(sizeof number) ? number : -1;
}

// A process inherits the variable, but not the descriptor, and opens a file of its own there.
TEST(LaunchEnvironment, ACauseIsReportedToTheLaunchersFileAlone) {
  const int own = ::memfd_create(kReportsName, 0);
  EXPECT_EQ(reported_cause(own), 7);
  ::close(own);
  report_cause(6);  // nobody to be told
  const test::TemporaryFolder folder;
  for (const int fd : {::open((folder / "metrics.jsonl").c_str(), O_RDWR | O_CREAT, 0600), ::memfd_create("other", 0)}) {
    ASSERT_GE(fd, 0);
    EXPECT_EQ(reported_cause(fd), -1);
    EXPECT_EQ(::lseek(fd, 0, SEEK_END), 0);
    ::close(fd);
    EXPECT_EQ(reported_cause(fd), -1) << "closed";
  }
}

}  // namespace mantissa::launch_environment_test
