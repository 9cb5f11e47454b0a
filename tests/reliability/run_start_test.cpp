// Another process trains in the folder of a run between this run's first look at it and its lock, while this one reads the weights.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"
#include "metrics/run_metrics.h"
#include "reliability/fault_injection.h"
#include "training.h"

namespace mantissa::run_start_test {

namespace fs = std::filesystem;
using test::error_of;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class RunStart : public test::TrainingTest {
 protected:
  // The error of the run "mine" if `action` happens when it first opens a file of this path.
  Error error_with(const std::function<void()>& action, const char* path, std::vector<std::string> sets) const {
    const LoadedConfig mine = config("mine", std::move(sets));
    test::arm_fault({.kind = test::Fault::other, .at = 1, .only = "open", .path = path, .action = action});
    const Error error = error_of([&] { run(mine); });
    EXPECT_TRUE(test::fault_state.hit);
    test::disarm_fault();
    return error;
  }

  static constexpr const char* kWeights = "runs/other/checkpoints/step-";
  static constexpr const char* kLock = "runs/mine/checkpoints/LOCK";

  // Puts the checkpoints of the run "other" there.
  void put_checkpoints() const {
    fs::create_directories(run_folder("mine"));
    fs::copy(run_folder("other") + "/checkpoints", run_folder("mine") + "/checkpoints", fs::copy_options::recursive);
  }
};

TEST_F(RunStart, CheckpointsThatCameBeforeTheLockAreLeftAlone) {
  run("other", {"training.steps=3", "checkpoint.interval=1"});
  const std::string init = "checkpoint.init_from=" + run_folder("other");
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{init}, {init, "checkpoint.resume=auto"}, {"checkpoint.resume=" + checkpoint("other", 3)}}) {
    for (const char* path : {kWeights, kLock}) {
      const Error error = error_with([&] { put_checkpoints(); }, path, sets);
      EXPECT_EQ(error.code(), ExitCode::usage) << sets.back();
      EXPECT_THAT(error.what(), HasSubstr("mine: holds metrics or checkpoints of an earlier run"));
      EXPECT_THAT(test::names_in(run_folder("mine") + "/checkpoints"), Each(Not(StartsWith(".")))) << sets.back();
      for (const int64_t step : {1, 2, 3}) EXPECT_TRUE(test::same_elements(state_of("mine", step), state_of("other", step)));
      EXPECT_FALSE(fs::exists(run_folder("mine") + "/run.json"));
      fs::remove_all(run_folder("mine"));
    }
  }
  const std::string metrics = run_folder("mine") + "/metrics.jsonl";
  const auto put_metrics = [&] {
    fs::create_directories(run_folder("mine"));
    test::write_file(metrics, "{}\n");
  };
  for (const auto& [path, set] : {std::pair{kWeights, init}, {kLock, "checkpoint.resume=" + run_folder("other")}}) {
    EXPECT_EQ(error_with(put_metrics, path, {set}).code(), ExitCode::usage) << set;
    EXPECT_EQ(test::read_file(metrics), "{}\n");
    fs::remove_all(run_folder("mine"));
  }
}

// There is nothing of it that another run would harm.
TEST_F(RunStart, ARunThatDiedBeforeItsFirstStepDoesNotHoldItsName) {
  const LoadedConfig mine = config("mine", {"training.steps=2", "schedule.warmup_steps=1"});
  const TrainEvents dies = {.request = []() -> Request { fail(ExitCode::environment, "dies"); }};
  EXPECT_EQ(error_of([&] { train(mine, {"test"}, dies); }).code(), ExitCode::environment);
  const std::string metrics = run_folder("mine") + "/metrics.jsonl", started = test::read_file(metrics);
  EXPECT_EQ(std::ranges::count(started, '\n'), 1) << started;
  for (const size_t whole : {started.size(), started.size() - 1, size_t{5}, size_t{0}}) {  // killed while it wrote that line
    fs::remove_all(run_folder("mine"));
    fs::create_directories(run_folder("mine"));
    test::write_file(metrics, started.substr(0, whole));
    EXPECT_EQ(run(mine).steps.size(), 2U) << whole;
    EXPECT_EQ(read_run_metrics(run_folder("mine")).loss.size(), 2U);
    EXPECT_EQ(error_of([&] { run(mine); }).code(), ExitCode::usage) << "now it does";
  }
}

TEST_F(RunStart, MetricsWithoutCheckpointsDoNotKeepAutoFromStarting) {
  fs::create_directories(run_folder("mine"));
  test::write_file(run_folder("mine") + "/metrics.jsonl", "{}\n");
  EXPECT_EQ(run("mine", {"checkpoint.resume=auto", "training.steps=2", "schedule.warmup_steps=1"}).steps.size(), 2U);
}

}  // namespace mantissa::run_start_test
