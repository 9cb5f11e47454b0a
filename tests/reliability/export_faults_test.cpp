// Exports beside training under kills and errors of the system at every file operation.
#include <gmock/gmock.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <thread>

#include "checkpoint_testing.h"
#include "hang.h"
#include "io/pending_folder.h"
#include "mantissa/base/log.h"
#include "process.h"
#include "reliability/fault_injection.h"
#include "train/run_exports.h"
#include "training.h"

namespace mantissa::test::export_faults_test {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// A finished run that keeps the checkpoints of steps 1 and 2, and has the export of the first.
class FinishedRun : public TrainingTest {
 public:
  FinishedRun() {
    run("run", sets({"checkpoint.interval=1", "training.steps=2"}));
    config_ = config("run", sets({"checkpoint.export.weights=packed"})).config;
    for (const int64_t step : {1, 2}) EXPECT_EQ(make(step).problem, "");
    expected_ = files_of(1);
    second_ = files_of(2);
  }
  void TestBody() override {}

  using Files = std::map<std::string, std::string>;

  using TrainingTest::checkpoint;
  static std::vector<std::string> sets(std::vector<std::string> more) {
    more.insert(more.end(), {"training.threads=1", "model.num_layers=1", "model.intermediate_size=64", "precision.dtype=bf16",
                             "precision.recipe=mxfp8"});
    return more;
  }

  // The outcome of the export of a step that a run asks for; the fault is armed for all that it does.
  ExportEvent make(int64_t step, const Fault& fault = {}) const {
    ExportEvent made;
    CheckpointReader reader(checkpoint("run", step));
    const SavedCheckpoint saved{.path = reader.directory(), .hash = reader.hash()};
    std::optional<CheckpointDirectory> directory;
    directory.emplace(config_.checkpoint.dir, KeepPolicy{}, "test");
    RunExports exports(config_, {}, [&](const ExportEvent& event) { made = event; });
    arm_fault(fault);
    exports.add(saved, directory);
    while (exports.pending() > 0) exports.advance(directory);
    return made;
  }

  fs::path exports() const { return run_folder("run") + "/exports"; }
  Files files_of(int64_t step) const {
    Files files;
    for (const auto& entry : fs::directory_iterator(exports() / checkpoint_name(step)))
      files[entry.path().filename()] = read_file(entry.path());
    return files;
  }
  bool there(int64_t step) const { return fs::exists(exports() / checkpoint_name(step)); }
  // Removes all that lies beside the export of step 1.
  void forget_others() const {
    for (const auto& entry : fs::directory_iterator(exports()))
      if (entry.path().filename() != checkpoint_name(1)) fs::remove_all(entry.path());
  }

  // An export that is there is whole, the other export is as before.
  void expect_nothing_half_made(int point) const {
    if (there(2)) {
      EXPECT_EQ(files_of(2), second_) << point;
    }
    EXPECT_EQ(files_of(1), expected_) << point;
  }
  void expect_whole_checkpoints() const {
    for (const int64_t step : {1, 2}) EXPECT_NO_THROW(CheckpointReader(checkpoint("run", step)).verify());
  }
  // The next export makes it, and sweeps what was left. If it is there already, the next export or start of a run sweeps.
  void expect_made_by_the_next_one(int point) const {
    if (there(2)) sweep_pending_folders(exports());
    const std::string problem = make(2).problem;
    disarm_fault();
    EXPECT_EQ(problem, "") << point;
    EXPECT_EQ(files_of(2), second_) << point;
    EXPECT_THAT(names_in(exports()), ElementsAre("step-00000001", "step-00000002")) << point;
  }

  RunConfig config_;
  Files expected_, second_;
};

// All tests have the same run.
class ExportFaults : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { made_ = std::make_unique<FinishedRun>(); }
  static void TearDownTestSuite() { made_.reset(); }
  void SetUp() override { made_->forget_others(); }
  ~ExportFaults() override { disarm_fault(); }

  static inline std::unique_ptr<FinishedRun> made_;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
};

TEST_F(ExportFaults, AKillAtAnyFileOperationLeavesAWholeExportOrNoneAndTheNextRunMakesIt) {
  int without = 0, with = 0;
  for (int point = 1;; ++point) {
    ASSERT_LT(point, 400);
    made_->forget_others();
    const int status = wait_for(start_child([&] { return made_->make(2, {.kind = Fault::kill, .at = point}).problem.empty() ? 0 : 1; }));
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      break;
    }
    ++(made_->there(2) ? with : without);
    EXPECT_FALSE(with > 0 && !made_->there(2)) << "the export was lost again at file operation " << point;
    made_->expect_nothing_half_made(point);
    made_->expect_made_by_the_next_one(point);
  }
  EXPECT_GT(without, 20);
  EXPECT_GT(with, 0);
  made_->expect_whole_checkpoints();
}

// One of the two at each operation: exports do not tell them apart.
TEST_F(ExportFaults, AnErrorAtAnyFileOperationFailsTheExportAloneAndTheNextOneIsMade) {
  int failed = 0;
  for (int point = 1;; ++point) {
    ASSERT_LT(point, 400);
    made_->forget_others();
    const ExportEvent made = made_->make(2, {.kind = Fault::error, .at = point, .error_number = point % 2 == 0 ? ENOSPC : EIO});
    if (!disarm_fault()) break;
    EXPECT_EQ(made.step, 2) << point;
    EXPECT_TRUE(made.problem.empty() ? made_->there(2) : made.path.empty()) << "file operation " << point;
    failed += made.problem.empty() ? 0 : 1;
    made_->expect_nothing_half_made(point);
    made_->expect_made_by_the_next_one(point);
  }
  EXPECT_GT(failed, 20);
  made_->expect_whole_checkpoints();
}

// The byte changes when every rank has read back what it wrote.
TEST_F(ExportFaults, AByteThatChangesBeforeAnExportIsComparedFailsIt) {
  bool flipped = false;
  const auto flip = [&] {
    for (const auto& entry : fs::directory_iterator(made_->exports())) {
      const std::string file = entry.path() / "model.safetensors";
      if (entry.path().filename() == checkpoint_name(1) || !fs::exists(file)) continue;
      std::string bytes = read_file(file);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      write_file(file, bytes);
      flipped = true;
    }
  };
  const ExportEvent made = made_->make(2, {.kind = Fault::other, .at = 1, .only = "open", .path = "mantissa.json", .action = flip});
  EXPECT_TRUE(disarm_fault() && flipped);
  EXPECT_THAT(made.problem, ::testing::HasSubstr("what was written is not what was to be: model."));
  made_->expect_nothing_half_made(0);
  EXPECT_FALSE(made_->there(2));
  made_->expect_made_by_the_next_one(0);
}

// One that nobody waits for any longer reads no more tensors: its thread is held at the first until the run lets go of it.
TEST_F(ExportFaults, OneThatIsLetGoEndsAtItsNextTensor) {
  const auto reads = [] { return calls_since_armed({"pread"}).size(); };
  EXPECT_EQ(made_->make(2, {.only = "pread"}).problem, "");
  disarm_fault();
  const size_t whole = reads();
  made_->forget_others();

  CheckpointReader reader(made_->checkpoint("run", 2));
  std::optional<CheckpointDirectory> directory;
  directory.emplace(made_->config_.checkpoint.dir, KeepPolicy{}, "test");
  std::atomic<bool> held = false, let_go = false;
  const auto hold = [&, of_the_run = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != of_the_run && !held.exchange(true)) {
      while (!let_go) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the request to stop comes in this time
    }
    fault_state.armed = true;
  };
  {
    RunExports exports(made_->config_, {}, [](const ExportEvent&) { ADD_FAILURE() << "it was made"; });
    arm_fault({.kind = Fault::other, .at = 1, .times = 1'000'000, .only = "pread", .action = hold});
    exports.add({.path = reader.directory(), .hash = reader.hash()}, directory);
    while (!held) std::this_thread::yield();
    let_go = true;
  }
  disarm_fault();
  EXPECT_LT(reads(), whole / 2);
  EXPECT_FALSE(made_->there(2));
}

class StoppedRun : public TrainingTest {
 protected:
  ~StoppedRun() override { disarm_fault(); }
};

// The thread of the export is held at its first tensor until the run says that it lets go of it, which a run that waits for it never does.
TEST_F(StoppedRun, LeavesAnExportThatIsNotMadeWithinItsGrace) {
  using Clock = std::chrono::steady_clock;
  open_log({.console = false, .file = folder_ / "log.txt"});
  const auto let_go = [&] { return read_file(folder_ / "log.txt").find("was interrupted") != std::string::npos; };
  std::optional<Clock::time_point> stopped;
  const auto seconds = [&] { return stopped ? std::chrono::duration<double>(Clock::now() - *stopped).count() : 0.0; };
  std::atomic<bool> held = false;
  const auto hold = [&, of_the_run = std::this_thread::get_id()] {
    if (std::this_thread::get_id() != of_the_run && !held.exchange(true)) {
      while (!let_go() && seconds() < 120.0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    fault_state.armed = true;
  };
  const auto request = [&, calls = 0]() mutable {
    if (++calls == 2) {  // the export of step 1 has begun
      EXPECT_TRUE(eventually([&] { return held.load(); }));
      stopped = Clock::now();
    }
    return stopped ? Request::save_and_stop : Request::none;
  };
  const LoadedConfig loaded =
      config("run", FinishedRun::sets({"checkpoint.interval=1", "checkpoint.export={}", "training.steps=9", "logging.interval=100"}));
  arm_fault({.kind = Fault::other, .at = 1, .times = 1'000'000, .only = "pread", .action = hold});
  const TrainSummary summary = run(loaded, request).summary;
  EXPECT_GE(seconds(), 20.0);
  EXPECT_TRUE(let_go());
  close_log();
  EXPECT_EQ(summary.exit, ExitCode::stopped);
  EXPECT_EQ(summary.steps, 1);
  EXPECT_FALSE(fs::exists(run_folder("run") + "/exports/step-00000001"));
}

}  // namespace mantissa::test::export_faults_test
