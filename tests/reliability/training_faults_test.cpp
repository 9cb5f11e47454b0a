// The real program under signals, a second start, closed outputs and a checkpoint folder that goes away (fault table rows 7, 25, 27, 28).
#include <gmock/gmock.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "process.h"
#include "training.h"

namespace mantissa::training_faults_test {

using test::read_file;
using test::TrainedRun;
using ::testing::HasSubstr;
using ::testing::Not;

// mantissa train as a child, its output in files or where told.
class Training : public test::BackgroundProcess {
 public:
  Training(const std::string& config, const std::vector<std::string>& sets, const std::string& output, std::vector<std::string> more = {})
      : BackgroundProcess(words(config, sets, std::move(more)), ".", output) {}

 private:
  static std::vector<std::string> words(const std::string& config, const std::vector<std::string>& sets, std::vector<std::string> more) {
    std::vector<std::string> out = {MANTISSA_BINARY, "train", config};
    for (const std::string& set : sets) out.insert(out.end(), {"--set", set});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
};

class TrainingFaults : public test::TrainingTest {
 protected:
  TrainingFaults() {
    test::write_file(folder_ / "run.json", effective_config(config("run", {"training.steps=1000000", "schedule.type=constant"}).config));
  }

  std::vector<std::string> named(const std::string& name, std::vector<std::string> sets = {}) const {
    sets.insert(sets.end(),
                {"logging.run_name=" + name, "logging.dir=" + run_folder(name), "checkpoint.dir=" + run_folder(name) + "/checkpoints"});
    return sets;
  }

  // Lines of the metrics that hold this.
  int lines(const std::string& name, const std::string& what) const {
    const std::string path = run_folder(name) + "/metrics.jsonl";
    if (!std::filesystem::exists(path)) return 0;
    const std::string metrics = read_file(path);
    int found = 0;
    for (size_t at = 0; (at = metrics.find(what, at)) != std::string::npos; ++at) ++found;
    return found;
  }

  // Waits until there are so many, a minute at most.
  void await(const std::string& name, const std::string& what, int count) const {
    for (int i = 0; i < 6000; ++i) {
      if (lines(name, what) >= count) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    FAIL() << name << ": no " << what << ": " << read_file(folder_ / "out");
  }

  // Continues from the last save that was reported; a kill may have left a newer one that `latest` does not name yet.
  void expect_resumable(const std::string& name) const {
    const int64_t step = open_checkpoint(run_folder(name)).manifest().step;
    Training rest(folder_ / "run.json", named(name, {text("training.steps=", step + 3)}), folder_ / "out", {"--resume"});
    EXPECT_EQ(rest.wait(), 0) << read_file(folder_ / "out");
    EXPECT_THAT(read_file(folder_ / "out"), HasSubstr(text("continues at ", step)));
  }
};

// One run meets a second one in its folder, two signals to save and one to stop.
TEST_F(TrainingFaults, ARunHasItsFolderForItselfSavesOnceForEachSignalAndStopsWith75) {
  Training training(folder_ / "run.json", named("one"), folder_ / "out");
  await("one", "\"type\":\"step\"", 3);
  for (const std::vector<std::string>& more : {std::vector<std::string>{}, std::vector<std::string>{"--set", "checkpoint.resume=auto"}}) {
    Training second(folder_ / "run.json", named("one"), folder_ / "second", more);
    EXPECT_EQ(second.wait(), 3) << read_file(folder_ / "second");
    EXPECT_THAT(read_file(folder_ / "second"), HasSubstr("in use"));
  }
  for (const int saves : {1, 2}) {
    training.send(SIGUSR2);
    await("one", "\"type\":\"checkpoint\"", saves);
  }
  await("one", "\"type\":\"step\"", lines("one", "\"type\":\"step\"") + 5);
  EXPECT_EQ(lines("one", "\"type\":\"checkpoint\""), 2) << "one for each";
  training.send(SIGTERM);
  EXPECT_EQ(training.wait(), 75) << read_file(folder_ / "out");
  expect_resumable("one");
  for (const int signal : {SIGINT, SIGUSR1}) {
    const std::string name = text("signal-", signal);
    Training other(folder_ / "run.json", named(name), folder_ / "out");
    await(name, "\"type\":\"step\"", 1);
    other.send(signal);
    EXPECT_EQ(other.wait(), 75) << read_file(folder_ / "out");
    EXPECT_GT(open_checkpoint(run_folder(name)).manifest().step, 0);
  }
}

TEST_F(TrainingFaults, SecondInterruptEndsAtOnce) {
  // Plain kernels and long sequences: a step takes seconds, so the second signal comes before the first one is met.
  const std::vector<std::string> slow = {"training.device=cpu_reference", "model.hidden_size=512",
                                         "model.intermediate_size=2048",  "model.head_dim=256",
                                         "training.seq_len=1024",         "model.max_position_embeddings=1024",
                                         "training.micro_batch_size=8",   "training.grad_accum=2",
                                         "training.global_batch_size=16"};
  Training training(folder_ / "run.json", named("twice", slow), folder_ / "out");
  await("twice", "\"type\":\"start\"", 1);
  training.send(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  training.send(SIGINT);
  EXPECT_EQ(training.wait(), 130) << read_file(folder_ / "out");
}

TEST_F(TrainingFaults, KilledRunLeavesAFolderThatCanBeContinued) {
  Training training(folder_ / "run.json", named("killed", {"checkpoint.interval=2"}), folder_ / "out");
  await("killed", "\"type\":\"checkpoint\"", 2);
  training.send(SIGKILL);
  EXPECT_EQ(training.wait(), 137);
  expect_resumable("killed");
}

TEST_F(TrainingFaults, FullOutputAndReaderThatWentAwayDoNotStopTraining) {
  Training full(folder_ / "run.json", named("full", {"training.steps=20"}), "/dev/full");
  EXPECT_EQ(full.wait(), 0);
  const std::string binary = MANTISSA_BINARY;
  const auto piped = test::run_process(
      {"bash", "-o", "pipefail", "-c",
       binary + " train run.json --set training.steps=30 --set logging.run_name=piped --set logging.dir=" + run_folder("piped") +
           " --set checkpoint.dir=" + run_folder("piped") + "/checkpoints | head -1"},
      folder_.path());
  EXPECT_EQ(piped.exit_code, 0) << piped.errors;
  for (const char* name : {"full", "piped"}) EXPECT_EQ(list_checkpoints(run_folder(name) + "/checkpoints").size(), 1U) << name;
  EXPECT_THAT(read_file(run_folder("full") + "/log.txt"), HasSubstr("lines of output dropped"));
}

TEST_F(TrainingFaults, ClosedStandardStreamsDoNotBecomeFilesOfTheRun) {
  const auto run =
      test::run_process({"bash", "-c", "exec " MANTISSA_BINARY " train run.json --set training.steps=20 <&- >&- 2>&-"}, folder_.path());
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(read_file(run_folder("run") + "/checkpoints/LOCK"), "");
  const std::string metrics = read_file(run_folder("run") + "/metrics.jsonl");
  EXPECT_THAT(metrics, HasSubstr("\"step\":20"));
  EXPECT_THAT(metrics, Not(HasSubstr("step    20/20")));
  EXPECT_EQ(test::run_process({"bash", "-c", "exec " MANTISSA_BINARY " config schema >&-"}, folder_.path()).exit_code, 0);
}

// ---- a limit on the size of files

TEST_F(TrainingFaults, FileSizeLimitFailsSavesForTheRightReasonAndTheLastOneDecides) {
  const auto run = test::run_process(
      {"bash", "-c", "ulimit -f 40; exec " MANTISSA_BINARY " train run.json --set training.steps=20 --set checkpoint.interval=8"},
      folder_.path());
  EXPECT_EQ(run.exit_code, 7) << run.errors;
  EXPECT_THAT(run.output, HasSubstr("step    20/20"));
  EXPECT_THAT(run.output, HasSubstr("3 saves failed"));
  EXPECT_THAT(run.errors, HasSubstr("File too large"));
  EXPECT_THAT(run.errors, Not(HasSubstr("No space left")));
}

TEST_F(TrainingFaults, FileSizeLimitThatOnlyLogsReachDropsTheirLines) {
  const std::vector<std::string> words = {MANTISSA_BINARY, "train", "run.json", "--set", "training.steps=10"};
  ASSERT_EQ(test::run_process(words, folder_.path()).exit_code, 0);
  for (const char* const log : {"/metrics.jsonl", "/log.txt"}) {
    std::ofstream(run_folder("run") + log, std::ios::app) << R"({"type":"filler","text":")" << std::string(1 << 20, '.') << "\"}\n";
  }
  const std::string before = read_file(run_folder("run") + "/metrics.jsonl");
  const auto run = test::run_process(
      {"bash", "-c", "ulimit -f 1024; exec " MANTISSA_BINARY " train run.json --set training.steps=20 --resume"}, folder_.path());
  EXPECT_EQ(run.exit_code, 0) << run.errors;
  EXPECT_EQ(read_file(run_folder("run") + "/metrics.jsonl"), before);
  EXPECT_THAT(run.errors, HasSubstr("metrics.jsonl: writing failed: File too large"));
  EXPECT_THAT(run.output, HasSubstr(" lines of output dropped"));
  const std::string without_metrics =
      "ulimit -f 1024; exec " MANTISSA_BINARY " train run.json --set training.steps=21 --resume --set logging.jsonl=false";
  const auto last = test::run_process({"bash", "-c", without_metrics}, folder_.path());
  EXPECT_EQ(last.exit_code, 0) << last.errors;
  EXPECT_THAT(last.output, HasSubstr(" of output dropped")) << "of the log";
}

TEST_F(TrainingFaults, RunFolderThatCannotBeWrittenLosesNoWorkAndIsNotCalledAFailedSave) {
  const auto run = test::run_process({"bash", "-c", "ulimit -f 1; exec " MANTISSA_BINARY " train run.json"}, folder_.path());
  EXPECT_EQ(run.exit_code, 3) << run.errors;
  EXPECT_THAT(run.errors, HasSubstr("config.json.tmp: writing failed: File too large"));
}

// ---- the checkpoint folder goes away (in this process)

struct GoesAway {
  const char* name;
  int back;  // before this step; 0: never
  Request at_five;
  size_t steps;
  int failed;
  ExitCode exit;
};

// From step 5 on a file is in the way.
TEST_F(TrainingFaults, FailedSavesAreCountedAndTheLastOneDecides) {
  for (const GoesAway& row : {GoesAway{"gone", 0, Request::none, 20, 4, ExitCode::storage},  // 6, 12, 18, 20
                              GoesAway{"back", 10, Request::none, 20, 1, ExitCode::ok},
                              GoesAway{"stopped", 0, Request::save_and_stop, 4, 1, ExitCode::storage}}) {
    const std::string folder = run_folder(row.name) + "/checkpoints";
    int calls = 0;
    const auto at_step = [&] {
      ++calls;
      if (calls == 5) {
        std::filesystem::rename(folder, folder + "-away");
        test::write_file(folder, "a file in the way");
      }
      if (calls == row.back) {
        std::filesystem::remove(folder);
        std::filesystem::rename(folder + "-away", folder);
      }
      return calls == 5 ? row.at_five : Request::none;
    };
    const TrainedRun trained = run(config(row.name, {"checkpoint.interval=6"}), at_step);
    EXPECT_EQ(trained.steps.size(), row.steps) << row.name;
    EXPECT_EQ(trained.summary.failed_saves, row.failed) << row.name;
    EXPECT_EQ(trained.summary.exit, row.exit) << row.name;
  }
}

}  // namespace mantissa::training_faults_test
