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

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kTrain = std::string(MANTISSA_BINARY) + " train run.json --set logging.dir=";

class LaunchedTraining : public test::LaunchedTraining {
 protected:
  std::vector<nlohmann::json> events(const std::string& name, const std::string& type) const {
    std::istringstream lines(test::read_file(folder_ / (name + "/metrics.jsonl")));
    std::vector<nlohmann::json> out;
    for (std::string line; std::getline(lines, line);) {
      if (nlohmann::json json = nlohmann::json::parse(line); json.at("type") == type) out.push_back(std::move(json));
    }
    return out;
  }
  // The number that a script has written.
  pid_t pid_in(const std::string& file) const {
    EXPECT_TRUE(appears(file));
    return std::stoi(test::read_file(folder_ / file));
  }
  void expect_bytes_sent(const std::string& name) const;
  void expect_time_line(const std::string& name, int rank) const;
};

// The steps 5 and 6 have no evaluation.
void LaunchedTraining::expect_bytes_sent(const std::string& name) const {
  const std::vector<nlohmann::json> steps = events(name, "step");
  ASSERT_EQ(steps.size(), 40U);
  const nlohmann::json sent = steps[4].at("comm_bytes");
  EXPECT_EQ(steps[5].at("comm_bytes"), sent);
  // Both ranks send what the other owns of the gradients (fp32) and what they own of the weights: all of them once. Codes and scales of the
  // matrices, the others bf16. In the arenas each parameter is padded to 32 elements.
  const int64_t matrices = 4 * 64 * 64 + 3 * 96 * 64, others = 8 * 64 + 16 * 64 + 3 * 64 + 8 * 64;
  EXPECT_GE(sent.at("gradients"), 4 * (matrices + others) - 4 * 16 * 64);
  EXPECT_LE(sent.at("gradients"), 4 * (matrices + others) + 4 * 64 * 32);
  EXPECT_GE(sent.at("parameters"), matrices);
  EXPECT_LE(sent.at("parameters"), matrices + matrices / 32 + 2 * (others + 64 * 32));
  EXPECT_GT(sent.at("control"), 0);
  EXPECT_EQ(sent.at("other"), 0);
}

// Expects the spans of two steps with two micro batches each, and the bytes on the wire.
void LaunchedTraining::expect_time_line(const std::string& name, int rank) const {
  const nlohmann::json trace = nlohmann::json::parse(test::read_file(folder_ / (name + "/trace.json")));
  std::map<std::string, int> spans;
  std::map<std::string, std::set<int>> threads;
  for (const nlohmann::json& event : trace) {
    if (event.at("pid") != rank || event.at("ph") != "X") continue;
    ++spans[event.at("name")];
    threads[event.at("name")].insert(event.at("tid").get<int>());
  }
  for (const auto& [span, least] : {std::pair{"backward", 4}, {"optimizer", 2}, {"gradients", 2}, {"parameters", 2}, {"gemm", 24}})
    EXPECT_GE(spans[span], least) << span;
  EXPECT_EQ(spans["forward"], 4);
  EXPECT_EQ(threads["gemm"].size(), 1U);
  EXPECT_EQ(threads["gradients"].size(), 1U);
  EXPECT_NE(threads["gradients"], threads["gemm"]) << "exchanges run beside the computation";
  EXPECT_EQ(threads["parameters"], threads["gradients"]);
}

TEST_F(LaunchedTraining, HasTheLossesAndWeightsOfOneProcessAndTellsWhatItDid) {
  for (const auto& [ranks, set] : {std::pair(2, R"(training.trace={"steps":[2,3]})"), std::pair(4, "training.threads=0")}) {
    const std::string name = "ranks" + std::to_string(ranks);
    const auto run = launch(ranks, train(name, {"--set", set}));
    ASSERT_EQ(run.exit_code, 0) << run.errors;
    EXPECT_THAT(run.output, HasSubstr("[rank0]:done | step 40"));
    EXPECT_EQ(run.output.find("[rank1]:"), std::string::npos) << "only rank 0 prints";
    EXPECT_EQ(course(name), course(alone())) << ranks;
    expect_equal(alone(), name);
  }
  expect_bytes_sent("ranks2");
  for (const int rank : {0, 1}) expect_time_line("ranks2", rank);
  const nlohmann::json config = nlohmann::json::parse(test::read_file(folder_ / "ranks4/config.json"));
  EXPECT_EQ(config.at("training").at("threads"), 0) << "threads that nobody chose are not stored";
  EXPECT_EQ(mantissa(train("bad", {"--set", R"(training.trace={"steps":[3,2]})"})).exit_code, 2);
}

// Compares processes, with all that they take beside tensors; layers of several sizes make buckets of several sizes.
TEST_F(LaunchedTraining, TakesTheMemoryThatIsPredicted) {
  for (const int ranks : {1, 4}) {
    const std::string name = text("memory", ranks);
    std::vector<std::string> command = train(name, {"--set", "checkpoint.interval=0", "--set", "eval.interval=0"});
    for (const char* const set : {"model.hidden_size=512", "model.num_layers=5", "model.intermediate_size=1408", "training.steps=2",
                                  "training.accumulation=running", "logging.interval=1"})
      command.insert(command.end(), {"--set", set});
    ASSERT_EQ(launch(ranks, command).exit_code, 0);
    command.insert(command.end(), {"--dry-run", "--world", std::to_string(ranks), "--set", "logging.dir=other"});
    const std::string preview = mantissa(command).output;
    std::smatch memory;
    ASSERT_TRUE(std::regex_search(preview, memory, std::regex("memory +([0-9.]+) MiB"))) << preview;
    double peak = 0;
    for (const nlohmann::json& step : events(name, "step")) peak = std::max(peak, 1024 * step.value("mem_gib", 0.0));
    EXPECT_NEAR(std::stod(memory[1]) / peak, 1.0, 0.05) << ranks << " ranks: " << memory[1] << " MiB predicted, " << peak << " MiB taken";
  }
}

// The settings are those of four ranks, and of the two that go on.
TEST_F(LaunchedTraining, GoesOnFromTheNewestCheckpointAfterARankWasKilled) {
  const std::string experts = " --set model.moe.num_experts=8 --set model.moe.num_experts_per_tok=2 --set model.moe.intermediate_size=32";
  const auto on_two = [&](const std::string& sets) { return launch(2, {"sh", "-c", "exec " + kTrain + "killed --resume" + sets}); };
  ASSERT_EQ(test::run_process({"sh", "-c", kTrain + "experts" + experts}, folder_.path()).exit_code, 0);
  for (const auto& [sets, alike] : {std::pair(std::string(), alone()), {experts + " --set parallel.expert=", folder_ / "experts"}}) {
    fs::remove_all(folder_ / "killed");
    const auto with_experts = [&](const char* ranks) { return sets.empty() ? sets : sets + ranks; };
    test::ProcessResult run;
    std::thread launcher([&] {
      run = launch(4, {"sh", "-c", "echo $$ > pid.$RANK; exec " + kTrain + "killed --set training.steps=1000000" + with_experts("4")});
    });
    const bool saved = appears("killed/checkpoints/step-00000020");
    ::kill(pid_in("pid.2"), SIGKILL);
    launcher.join();
    ASSERT_TRUE(saved) << run.errors;
    EXPECT_EQ(run.exit_code, 137);
    EXPECT_THAT(run.errors, HasSubstr("rank 2 failed first: SIGKILL"));
    for (const char* rank : {"0", "1", "3"}) EXPECT_THAT(run.errors, ContainsRegex(std::string("  ") + rank + " .* exit code 6"));
    for (const auto& entry : fs::directory_iterator(folder_ / "killed/checkpoints"))  // a busy machine may have got beyond 40
      if (entry.path().filename().string() > "step-00000020") fs::remove_all(entry.path());
    const auto resumed = on_two(with_experts("2"));
    EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_THAT(resumed.output, HasSubstr("done | step 40"));
    expect_equal(alike, "killed");
  }
}

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
  for (const std::string time : {"1", "2", "3", "4"}) {
    const auto run = launch(
        2, {"sh", "-c",
            "exec python3 reports.py " + kTrain + time + " --set checkpoint.interval=1000 --set eval.interval=0 --set training.steps=7"});
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

// In the first attempt rank 1 dies after the first checkpoint.
TEST_F(LaunchedTraining, IsStartedAgainByItsLauncher) {
  const std::string dies = R"(if [ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $RANK = 1 ]; then
      (while [ ! -e again/checkpoints/step-00000010 ]; do sleep 0.01; done; kill -9 $$) &
    fi; exec )";
  const auto run = launch(2, {"sh", "-c", dies + kTrain + "again"}, {"--max-restarts", "2"});
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("restart 1 of 2"));
  expect_equal(alone(), "again");
}

// One rank does something before or instead of the command of the others; nothing is written.
struct SpoiledStart {
  int ranks;
  std::string does;
  int code;
  std::string says;
  bool all_with_this_code = false;
  int rank = 1;  // the one that does it
};

TEST_F(LaunchedTraining, EndsWhereOneRankSpoilsTheStart) {
  fs::copy_file(MANTISSA_BINARY, folder_ / "other");  // like where one host was left out of an update
  test::write_file(folder_ / "other", test::read_file(folder_ / "other") + "\n");
  const std::string same = " train run.json --set logging.dir=never --set optimizer.lr=0.001";
  const std::string files = "rank 1 of 2 needs 66 open files, and the limit is ";
  const std::vector<SpoiledStart> starts = {
      {4, "exec " + kTrain + "never --set optimizer.lr=0.002", 2, "config optimizer.lr of rank 1 \\(.*\\) is 0.002, of most ranks 0.001"},
      {4, "exec ./other" + same, 2, "different inputs: executable of rank 1 \\(.*\\) is [0-9a-f]+, of most ranks [0-9a-f]+"},
      {2, "ulimit -n 20", 3, files + "20 \\(ulimit -Hn\\)"},
      {2, "ulimit -n 40", 3, files + "40 \\(ulimit -Hn\\)"},
      {4, "export UCX_TLS=nonesuch", 3, "UCX", true},
      {2, "sleep 1; exit 2", 2, "rank 1 failed first: exit code 2"},
      {2, "sleep 1; exit 2", 2, "rank 0 failed first: exit code 2", false, 0}};
  for (const SpoiledStart& start : starts) {
    const std::string script = text("if [ $RANK = ", start.rank, " ]; then ", start.does, "; fi; exec ", MANTISSA_BINARY, same);
    const auto run = launch(start.ranks, {"sh", "-c", script});
    EXPECT_EQ(run.exit_code, start.code) << run.errors;
    EXPECT_THAT(run.errors, ContainsRegex(start.says));
    for (int rank = 0; start.all_with_this_code && rank < start.ranks; ++rank)
      EXPECT_THAT(run.errors, ContainsRegex(text("  ", rank, " .* exit code ", start.code)));
    EXPECT_EQ(run.errors.find("SIGKILL"), std::string::npos) << "the launcher waited 30 s for a rank to heed SIGTERM\n" << run.errors;
    EXPECT_FALSE(fs::exists(folder_ / "never"));
  }
}

TEST_F(LaunchedTraining, AMissingTemporaryFolderIsNamed) {
  const auto run = test::run_process(
      {"env", "-u", "XDG_RUNTIME_DIR", "-u", "MANTISSA_SECRET", "TMPDIR=/nonesuch", "OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=2",
       "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=2", MANTISSA_BINARY, "train", "run.json"},
      folder_.path());
  EXPECT_EQ(run.exit_code, 3);
  EXPECT_THAT(run.errors, HasSubstr("set TMPDIR to a folder"));
}

TEST_F(LaunchedTraining, RequestToStopInTheRendezvousIsOneOfAll) {
  test::ProcessResult run;
  std::thread launcher([&] {
    run = launch(4, {"sh", "-c", "[ $RANK = 3 ] && exec sleep 60; echo $$ > pid.$RANK; exec " + kTrain + "never"});
  });
  const pid_t asked = pid_in("pid.1");
  std::this_thread::sleep_for(std::chrono::seconds(1));
  ::kill(asked, SIGTERM);
  launcher.join();
  EXPECT_EQ(run.exit_code, 75) << run.errors;
  EXPECT_FALSE(fs::exists(folder_ / "never"));
}

// A script that starts the program and does not become it: a signal ends it while the program saves, and the program ends with its
// launcher.
TEST_F(LaunchedTraining, IsEndedBehindAWrapper) {
  std::vector<std::thread> jobs;
  for (const int ranks : {1, 2}) {
    jobs.emplace_back([this, ranks] {
      const std::string name = text("wrapped", ranks), log = folder_ / name + ".log";
      const std::string script = "sh -c 'echo $$ > " + name + ".$RANK; exec " + kTrain + name +
                                 " --set checkpoint.resume=auto --set training.steps=1000000 2>> " + name + ".errors.$RANK'; true";
      const std::vector<std::string> words = {MANTISSA_BINARY, "launch", "--nproc-per-node", std::to_string(ranks), "--", "sh", "-c",
                                              script};
      test::BackgroundProcess saves(words, folder_.path(), log);
      ASSERT_TRUE(appears(name + "/checkpoints/step-00000010"));
      saves.send(SIGTERM);
      EXPECT_EQ(saves.wait(), 75) << saves.output();
      EXPECT_THAT(saves.output(), HasSubstr("The same command with --resume continues."));
      test::BackgroundProcess killed(words, folder_.path(), log);
      ASSERT_TRUE(killed.prints("continues at"));
      killed.send(SIGKILL);
      killed.wait();
      for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(test::ends(pid_in(text(name, ".", rank)))) << rank << " of " << ranks;
      const auto resumed = launch(ranks, train(name, {"--resume", "--set", "training.steps=1"}));
      EXPECT_EQ(resumed.errors.find("LOCK"), std::string::npos) << resumed.errors;
      // Either may see it first, and its end may end the other one before that does.
      std::string lines;
      for (int rank = 0; rank < ranks; ++rank) lines += test::read_file(folder_ / text(name, ".errors.", rank));
      EXPECT_THAT(lines, HasSubstr("the launcher of this rank has ended"));
    });
  }
  for (std::thread& job : jobs) job.join();
}

TEST_F(LaunchedTraining, ADamagedCheckpointEndsAllRanksWithTheCodeOfTheData) {
  fs::copy(alone() + "/checkpoints/step-00000040", folder_ / "step-00000040");
  const std::string shard = folder_ / "step-00000040/shard-00000.safetensors";
  std::string bytes = test::read_file(shard);
  bytes[bytes.size() - 5] ^= 1;  // in what the last rank reads
  test::write_file(shard, bytes);
  const auto run = launch(2, train("other", {"--set", "checkpoint.resume=step-00000040"}));
  EXPECT_EQ(run.exit_code, 4) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("is damaged"));
  for (const std::string rank : {"0", "1"}) EXPECT_THAT(run.errors, ContainsRegex("  " + rank + " .* exit code 4"));
}

}  // namespace mantissa::launch_train_test
