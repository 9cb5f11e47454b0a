// Runs of several processes over UCX, as a user starts them.
#include <signal.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "launched_training.h"

namespace mantissa::launch_train_test {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class LaunchedTraining : public test::LaunchedTraining {
 protected:
  // Each rank writes its process number before it becomes mantissa. `sets` may speak of $RANK.
  test::ProcessResult launch_with_pids(int ranks, const std::string& name, const std::string& sets) const {
    const std::string script =
        std::string("echo $$ > pid.$RANK; exec ") + MANTISSA_BINARY + " train run.json --set logging.dir=" + name + " " + sets;
    return launch(ranks, {"sh", "-c", script});
  }
  pid_t pid_of(int rank) const { return std::stoi(test::read_file(folder_ / ("pid." + std::to_string(rank)))); }
};

TEST_F(LaunchedTraining, HasTheLossesAndWeightsOfOneProcess) {
  ASSERT_EQ(mantissa(train("alone")).exit_code, 0);
  for (const int ranks : {2, 4}) {
    const std::string name = "ranks" + std::to_string(ranks);
    const auto run = launch(ranks, train(name));
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_THAT(run.output, HasSubstr("[rank0]:done | step 40"));
    EXPECT_EQ(run.output.find("[rank1]:"), std::string::npos) << "only rank 0 prints";
    EXPECT_EQ(course(name), course("alone")) << ranks;
    expect_equal("alone", name);
  }
}

TEST_F(LaunchedTraining, TellsWhatAllRanksSent) {
  ASSERT_EQ(launch(2, train("run", {"--set", "training.steps=4", "--set", "eval.interval=0"})).exit_code, 0);
  std::istringstream lines(test::read_file(folder_ / "run/metrics.jsonl"));
  std::vector<nlohmann::json> sent;
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json json = nlohmann::json::parse(line);
    if (json.at("type") == "step") sent.push_back(json.at("comm_bytes"));
  }
  ASSERT_EQ(sent.size(), 4U);
  EXPECT_EQ(sent[2], sent[3]) << "steps without an evaluation are alike";
  // Both ranks send what the other owns of the gradients (fp32) and what they own of the weights: all of them once. Codes and scales of the
  // matrices, the others bf16. In the arenas each parameter is padded to 32 elements.
  const int64_t matrices = 4 * 64 * 64 + 3 * 96 * 64, others = 8 * 64 + 16 * 64 + 3 * 64 + 8 * 64;
  EXPECT_GE(sent[3].at("gradients"), 4 * (matrices + others) - 4 * 16 * 64);
  EXPECT_LE(sent[3].at("gradients"), 4 * (matrices + others) + 4 * 64 * 32);
  EXPECT_GE(sent[3].at("parameters"), matrices);
  EXPECT_LE(sent[3].at("parameters"), matrices + matrices / 32 + 2 * (others + 64 * 32));
  EXPECT_GT(sent[3].at("control"), 0);
  EXPECT_EQ(sent[3].at("other"), 0);
}

// Of processes, with all that they take beside tensors; layers of several sizes make buckets of several sizes.
TEST_F(LaunchedTraining, TakesTheMemoryThatIsPredicted) {
  for (const int ranks : {1, 2, 4, 8}) {
    const std::string name = text("memory", ranks);
    std::vector<std::string> command = train(name, {"--set", "checkpoint.interval=0", "--set", "eval.interval=0"});
    for (const char* const set : {"model.hidden_size=512", "model.num_layers=5", "model.intermediate_size=1408", "training.steps=3",
                                  "training.accumulation=running", "training.global_batch_size=8", "logging.interval=1"})
      command.insert(command.end(), {"--set", set});
    ASSERT_EQ(launch(ranks, command).exit_code, 0);
    command.insert(command.end(), {"--dry-run", "--world", std::to_string(ranks), "--set", "logging.dir=other"});
    const std::string preview = mantissa(command).output;
    std::smatch memory;
    ASSERT_TRUE(std::regex_search(preview, memory, std::regex("memory +([0-9.]+) MiB"))) << preview;
    std::istringstream lines(test::read_file(folder_ / (name + "/metrics.jsonl")));
    double peak = 0;
    for (std::string line; std::getline(lines, line);) peak = std::max(peak, 1024 * nlohmann::json::parse(line).value("mem_gib", 0.0));
    EXPECT_NEAR(std::stod(memory[1]) / peak, 1.0, 0.05) << ranks << " ranks: " << memory[1] << " MiB predicted, " << peak << " MiB taken";
  }
}

TEST_F(LaunchedTraining, WritesATimeLineOfEachRank) {
  ASSERT_EQ(launch(2, train("run", {"--set", "training.steps=4", "--set", R"(training.trace={"steps":[2,3]})"})).exit_code, 0);
  for (const int rank : {0, 1}) {
    const nlohmann::json trace = nlohmann::json::parse(test::read_file(folder_ / ("run/trace-rank0000" + std::to_string(rank) + ".json")));
    std::map<std::string, int> spans;
    std::map<std::string, std::set<int>> threads;
    for (const nlohmann::json& event : trace.at("traceEvents")) {
      EXPECT_EQ(event.at("pid"), rank);
      ++spans[event.at("name")];
      threads[event.at("name")].insert(event.at("tid").get<int>());
    }
    for (const auto& [name, least] :
         {std::pair{"forward", 4}, {"backward", 4}, {"optimizer", 2}, {"gradients", 2}, {"parameters", 2}, {"gemm", 24}})
      EXPECT_GE(spans[name], least) << name;
    EXPECT_EQ(spans["forward"], 4) << "two micro batches in each of two steps";
    EXPECT_EQ(threads["gemm"].size(), 1U);
    EXPECT_EQ(threads["gradients"].size(), 1U);
    EXPECT_NE(threads["gradients"], threads["gemm"]) << "exchanges run beside the computation";
    EXPECT_EQ(threads["parameters"], threads["gradients"]);
  }
  EXPECT_EQ(mantissa(train("bad", {"--set", R"(training.trace={"steps":[3,2]})"})).exit_code, 2);
}

struct KilledRun {
  const char* name;
  std::vector<std::string> model;
  std::string at_four, at_two;  // settings of four ranks, and of the two that go on
};

class KilledTraining : public LaunchedTraining, public ::testing::WithParamInterface<KilledRun> {};

TEST_P(KilledTraining, GoesOnFromTheNewestCheckpointAfterARankWasKilled) {
  std::vector<std::string> sets = {"--set", "schedule.type=constant"};  // the rate of a step does not depend on how many there are
  for (const std::string& set : GetParam().model) sets.insert(sets.end(), {"--set", set});
  ASSERT_EQ(mantissa(train("alone", sets)).exit_code, 0);
  test::ProcessResult run;
  std::thread launcher([&] {
    std::string all = "--set training.steps=1000000 --set " + GetParam().at_four;
    for (const std::string& set : sets) all += ' ' + set;
    run = launch_with_pids(4, "killed", all);
  });
  const bool saved = appears("killed/checkpoints/step-00000020");
  ::kill(pid_of(2), SIGKILL);
  launcher.join();
  ASSERT_TRUE(saved) << run.errors;
  EXPECT_EQ(run.exit_code, 137);
  EXPECT_THAT(run.errors, HasSubstr("rank 2 failed first: SIGKILL"));
  for (const char* rank : {"0", "1", "3"})
    EXPECT_THAT(run.errors, ::testing::ContainsRegex(std::string("  ") + rank + " .* exit code 6")) << run.errors;
  for (const auto& entry : fs::directory_iterator(folder_ / "killed/checkpoints"))  // a busy machine may have got beyond 40
    if (entry.path().filename().string() > "step-00000020") fs::remove_all(entry.path());
  sets.insert(sets.end(), {"--resume", "--set", GetParam().at_two});
  const auto resumed = launch(2, train("killed", sets));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
  EXPECT_THAT(resumed.output, HasSubstr("done | step 40"));
  expect_equal("alone", "killed");
}

INSTANTIATE_TEST_SUITE_P(, KilledTraining,
                         ::testing::Values(KilledRun{"dense", {}, "parallel.expert=1", "parallel.expert=1"},
                                           KilledRun{"experts",
                                                     {"model.moe.num_experts=8", "model.moe.num_experts_per_tok=2",
                                                      "model.moe.intermediate_size=32"},
                                                     "parallel.expert=4",
                                                     "parallel.expert=2"}),
                         [](const auto& c) { return std::string(c.param.name); });

// A launcher that does not host rank 0 sees these alone. More than its step a rank reports only if it blames another; where leaving looked
// like a loss, one run in four did.
TEST_F(LaunchedTraining, EveryRankReportsEveryStepToItsLauncher) {
  // A launcher for one rank each: its file is copied when the rank has ended.
  test::write_file(folder_ / "reports.py",
                   "import fcntl, os, subprocess, sys\n"
                   "fd = os.memfd_create('mantissa-reports', 0)\n"
                   "fcntl.lockf(fd, fcntl.LOCK_EX)\n"
                   "code = subprocess.run(sys.argv[1:], env=dict(os.environ, MANTISSA_STEP_FD=str(fd)), pass_fds=[fd]).returncode\n"
                   "open('steps.' + os.environ['RANK'], 'wb').write(os.pread(fd, 100, 0))\n"
                   "sys.exit(code)\n");
  const std::string script = std::string("exec python3 reports.py ") + MANTISSA_BINARY +
                             " train run.json --set logging.dir=run$TIME --set logging.interval=1000 --set " +
                             "checkpoint.interval=1000 --set eval.interval=0 --set training.steps=7";
  for (const std::string time : {"1", "2", "3", "4", "5", "6"}) {
    const auto run = launch(2, {"sh", "-c", "TIME=" + time + "; " + script});
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    for (const size_t rank : {size_t{0}, size_t{1}}) {
      const std::string bytes = test::read_file(folder_ / ("steps." + std::to_string(rank)));
      int64_t step = 0;
      ASSERT_EQ(bytes.size(), (rank + 1) * sizeof step);
      std::memcpy(&step, bytes.data() + rank * sizeof step, sizeof step);
      EXPECT_EQ(step, 7) << "of rank " << rank;
    }
  }
}

TEST_F(LaunchedTraining, IsStartedAgainByItsLauncher) {
  ASSERT_EQ(mantissa(train("alone")).exit_code, 0);
  // In the first attempt rank 1 dies after the first checkpoint.
  const std::string script = std::string(R"(
    if [ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $RANK = 1 ]; then
      (while [ ! -e again/checkpoints/step-00000010 ]; do sleep 0.01; done; kill -9 $$) &
    fi
    exec )") + MANTISSA_BINARY +
                             " train run.json --set logging.dir=again";
  const auto run = launch(2, {"sh", "-c", script}, {"--max-restarts", "2"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("restart 1 of 2"));
  expect_equal("alone", "again");
}

TEST_F(LaunchedTraining, NamesTheRankWhoseConfigIsAnother) {
  const auto run = launch_with_pids(
      3, "odd", "--set training.accumulation=running --set training.global_batch_size=3 --set optimizer.lr=0.00$((RANK == 1 ? 2 : 1))");
  EXPECT_EQ(run.exit_code, 2) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("rank 1"));
  EXPECT_THAT(run.errors, ::testing::ContainsRegex("config optimizer.lr of rank 1 \\(.*\\) is 0.002, of most ranks 0.001"));
  EXPECT_FALSE(fs::exists(folder_ / "odd"));
}

// As where one host was left out of an update.
TEST_F(LaunchedTraining, NamesTheRankWhoseExecutableIsAnother) {
  fs::copy_file(MANTISSA_BINARY, folder_ / "other");
  test::write_file(folder_ / "other", test::read_file(folder_ / "other") + "\n");
  const std::string script = std::string("[ $RANK = 1 ] && exec ./other train run.json; exec ") + MANTISSA_BINARY + " train run.json";
  const auto run = launch(4, {"sh", "-c", script});
  EXPECT_EQ(run.exit_code, 2) << run.errors;
  EXPECT_THAT(run.errors,
              ::testing::ContainsRegex("different inputs: executable of rank 1 \\(.*\\) is [0-9a-f]+, of most ranks [0-9a-f]+"));
}

TEST_F(LaunchedTraining, EveryRankNeedsItsOpenFiles) {
  for (const std::string files : {"20", "40"}) {
    const std::string script = "[ $RANK = 1 ] && ulimit -n " + files + "; exec " + MANTISSA_BINARY + " train run.json";
    const auto run = launch(2, {"sh", "-c", script});
    EXPECT_EQ(run.exit_code, 3) << run.errors;
    EXPECT_THAT(run.errors, HasSubstr("rank 1 of 2 needs 66 open files, and the limit is " + files + " (ulimit -Hn)"));
  }
}

TEST_F(LaunchedTraining, AMissingTemporaryFolderIsNamed) {
  const auto run = test::run_process(
      {"env", "-u", "XDG_RUNTIME_DIR", "-u", "MANTISSA_SECRET", "TMPDIR=/nonesuch", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2",
       "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=2", MANTISSA_BINARY, "train", "run.json"},
      folder_.path());
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_THAT(run.errors, HasSubstr("TMPDIR has to name a folder"));
}

TEST_F(LaunchedTraining, StopsOnASignalToOneRankAfterTheSameStepOfAll) {
  test::ProcessResult run;
  std::thread launcher([&] { run = launch_with_pids(2, "stopped", "--set training.steps=1000000"); });
  ASSERT_TRUE(appears("stopped/checkpoints/step-00000010"));
  ::kill(pid_of(1), SIGTERM);
  launcher.join();
  EXPECT_EQ(run.exit_code, 75) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("The same command with --resume continues."));
}

// A script that starts the program and does not become it.
std::string wrapped(const std::string& name) {
  return std::string("sh -c 'echo $$ > pid.$RANK; exec ") + MANTISSA_BINARY +
         " train run.json --set training.steps=1000000 --set logging.dir=" + name + "'; true";
}

TEST_F(LaunchedTraining, SavesOnASignalThatEndsItsWrapper) {
  for (const int ranks : {1, 2}) {
    const std::string name = text("wrapped", ranks);
    test::BackgroundProcess launcher(
        {MANTISSA_BINARY, "launch", "--nproc-per-node", std::to_string(ranks), "--", "sh", "-c", wrapped(name)}, folder_.path(),
        folder_ / name + ".log");
    ASSERT_TRUE(appears(name + "/checkpoints/step-00000010"));
    launcher.send(SIGTERM);
    EXPECT_EQ(launcher.wait(), 75) << launcher.output();
    EXPECT_THAT(launcher.output(), HasSubstr("The same command with --resume continues."));
  }
}

TEST_F(LaunchedTraining, EndsWithItsLauncherBehindAWrapper) {
  for (const int ranks : {1, 2}) {
    const std::string name = text("killed", ranks);
    test::BackgroundProcess launcher(
        {MANTISSA_BINARY, "launch", "--nproc-per-node", std::to_string(ranks), "--", "sh", "-c", wrapped(name)}, folder_.path(),
        folder_ / name + ".log");
    ASSERT_TRUE(appears(name + "/checkpoints/step-00000010"));
    launcher.send(SIGKILL);
    launcher.wait();
    for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(test::ends(pid_of(rank))) << rank << " of " << ranks;
    const auto resumed = launch(ranks, train(name, {"--resume", "--set", "training.steps=1"}));
    EXPECT_EQ(resumed.errors.find("LOCK"), std::string::npos) << resumed.errors;
    EXPECT_THAT(test::read_file(folder_ / (name + "/log.txt")), HasSubstr("the launcher of this rank is gone"));
  }
}

TEST_F(LaunchedTraining, RankThatFailsBeforeTheRendezvousDoesNotHoldTheOthers) {
  for (const std::string mismatch : {"0", "1"}) {
    const std::string script =
        "[ $RANK = " + mismatch + " ] && sleep 1 && exit 2; exec " + MANTISSA_BINARY + " train run.json --set logging.dir=never";
    const auto run = launch(2, {"sh", "-c", script});
    EXPECT_EQ(run.exit_code, 2) << run.errors;
    EXPECT_EQ(run.errors.find("SIGKILL"), std::string::npos) << "the launcher waited 30 s for a rank to heed SIGTERM\n" << run.errors;
  }
}

TEST_F(LaunchedTraining, RequestToStopInTheRendezvousIsOneOfAll) {
  test::ProcessResult run;
  std::thread launcher([&] {
    const std::string command = std::string("exec ") + MANTISSA_BINARY + " train run.json --set logging.dir=never";
    run = launch(4, {"sh", "-c", "[ $RANK = 3 ] && exec sleep 60; echo $$ > pid.$RANK; " + command});
  });
  ASSERT_TRUE(appears("pid.0") && appears("pid.1"));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  ::kill(pid_of(1), SIGTERM);
  launcher.join();
  EXPECT_EQ(run.exit_code, 75) << run.errors;
  EXPECT_FALSE(fs::exists(folder_ / "never"));
}

TEST_F(LaunchedTraining, TransportThatOneRankCannotOpenEndsAllWithItsCode) {
  const std::string script = std::string("[ $RANK = 1 ] && export UCX_TLS=nonesuch; exec ") + MANTISSA_BINARY + " train run.json";
  const auto run = launch(4, {"sh", "-c", script});
  EXPECT_EQ(run.exit_code, 3) << run.errors;
  for (const std::string rank : {"0", "1", "2", "3"}) EXPECT_THAT(run.errors, ::testing::ContainsRegex("  " + rank + " .* exit code 3"));
}

TEST_F(LaunchedTraining, ThreadsThatNobodyChoseAreNotStored) {
  ASSERT_EQ(launch(2, train("run", {"--set", "training.threads=0", "--set", "training.steps=2"})).exit_code, 0);
  EXPECT_EQ(nlohmann::json::parse(test::read_file(folder_ / "run/config.json")).at("training").at("threads"), 0);
}

TEST_F(LaunchedTraining, ADamagedCheckpointEndsAllRanksWithTheCodeOfTheData) {
  ASSERT_EQ(mantissa(train("run")).exit_code, 0);
  const std::string shard = "run/checkpoints/step-00000040/shard-00000.safetensors";
  std::string bytes = test::read_file(folder_ / shard);
  bytes[bytes.size() - 5] ^= 1;  // in what the last rank reads
  test::write_file(folder_ / shard, bytes);
  const auto run = launch(2, train("other", {"--set", "checkpoint.resume=run/checkpoints/step-00000040"}));
  EXPECT_EQ(run.exit_code, 4) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("is damaged"));
  for (const std::string rank : {"0", "1"}) EXPECT_THAT(run.errors, ::testing::ContainsRegex("  " + rank + " .* exit code 4"));
}

}  // namespace mantissa::launch_train_test
