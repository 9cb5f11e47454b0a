// A disk that is too small for the checkpoints of a run: it is told before the first step, and the last state is worth more than the oldest
// checkpoint that only keep_latest keeps.
#include <gmock/gmock.h>

#include "checkpoint_testing.h"
#include "mantissa/base/free_space.h"
#include "mantissa/base/log.h"
#include "reliability/fault_injection.h"
#include "training.h"

namespace mantissa::test::save_room_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kState = 8000;  // bytes of a State: two tensors

// A disk that has room for so many bytes of checkpoints.
class SmallDisk : public CheckpointTest {
 protected:
  ~SmallDisk() override { free_now = nullptr; }

  void set_size(int64_t bytes) const {
    free_now = [this, bytes] {
      const auto saved = std::ranges::count_if(names_in(checkpoints()), [](const std::string& name) { return name.starts_with("step-"); });
      return std::max<int64_t>(0, bytes - kState * saved);
    };
  }
  std::vector<std::string> steps() const {
    std::vector<std::string> names = names_in(checkpoints());
    std::erase_if(names, [](const std::string& name) { return !name.starts_with("step-"); });
    return names;
  }
  static ExitCode save(CheckpointDirectory& directory, int64_t step, AfterSave after = AfterSave::run_goes_on) {
    return error_code_of([&] { directory.save(State(step).content(), after); });
  }
};

TEST_F(SmallDisk, ARunThatGoesOnGivesUpItsOldestButNeverHasLessThanTwo) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 3});
  for (const int64_t step : {1, 2, 3}) directory.save(State(step).content());
  set_size(3 * kState + kState / 2);
  EXPECT_EQ(save(directory, 4), ExitCode::ok);
  EXPECT_THAT(steps(), ElementsAre("step-00000002", "step-00000003", "step-00000004"));
  EXPECT_THAT(log(), HasSubstr("step-00000001: deleted, because the disk has no room for it and for the checkpoint of step 4"));
  set_size(2 * kState + kState / 2);  // two must stay
  EXPECT_EQ(save(directory, 5), ExitCode::storage);
  EXPECT_THAT(steps(), ElementsAre("step-00000002", "step-00000003", "step-00000004"));
}

TEST_F(SmallDisk, TheLastStateGetsThePlaceOfAllButOne) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 3});
  for (const int64_t step : {1, 2}) directory.save(State(step).content());
  set_size(2 * kState + kState / 2);
  EXPECT_EQ(save(directory, 3), ExitCode::storage);
  EXPECT_THAT(steps(), ElementsAre("step-00000001", "step-00000002"));
  EXPECT_EQ(save(directory, 4, AfterSave::run_ends), ExitCode::ok);
  EXPECT_THAT(steps(), ElementsAre("step-00000002", "step-00000004"));
  set_size(2 * kState);  // a tenth more than a state is asked for
  EXPECT_EQ(save(directory, 5, AfterSave::run_ends), ExitCode::storage) << "nothing would be left";
  EXPECT_THAT(steps(), ElementsAre("step-00000002", "step-00000004"));
}

TEST_F(SmallDisk, OnlyAsManyGoAsAreEnough) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 9});
  for (int64_t step = 1; step <= 6; ++step) directory.save(State(step).content());
  set_size(6 * kState);
  EXPECT_EQ(save(directory, 7), ExitCode::ok);
  EXPECT_THAT(steps(), ElementsAre("step-00000003", "step-00000004", "step-00000005", "step-00000006", "step-00000007"));
}

// Some checkpoints are kept for another reason than being new.
TEST_F(SmallDisk, ThoseThatAreKeptForAReasonStay) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 9, .every = 2});
  for (const int64_t step : {1, 2, 3, 4, 5, 6, 20}) directory.save(State(step).content());
  flip_byte(checkpoints() / "step-00000005/manifest.json", 5);
  directory.pin(3);
  set_size(7 * kState + kState / 5);  // one of 1, 3 and 5 is pinned and one is damaged; 20 is of a branch that was left
  EXPECT_EQ(save(directory, 7, AfterSave::run_ends), ExitCode::ok);
  EXPECT_THAT(steps(), ElementsAre("step-00000002", "step-00000003", "step-00000004", "step-00000005", "step-00000006", "step-00000007",
                                   "step-00000020"));
  EXPECT_EQ(save(directory, 9), ExitCode::storage) << "nothing is left that may go";
}

class SmallDiskOfARun : public TrainingTest {
 protected:
  ~SmallDiskOfARun() override { free_now = nullptr; }

  std::string log_of(const std::function<void()>& body) const {
    open_log({.console = false, .file = folder_ / "log.txt"});
    body();
    close_log();
    std::string content = read_file(folder_ / "log.txt");
    fs::remove(folder_ / "log.txt");
    return content;
  }
};

TEST_F(SmallDiskOfARun, IsToldWithBothNumbersBeforeTheFirstStep) {
  const std::vector<std::string> sets = {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=2",
                                         "schedule.warmup_steps=1"};
  run("first", sets);
  const int64_t bytes = CheckpointReader(checkpoint("first", 4)).bytes(), needed = room_for(bytes);
  free_now = [&] { return needed - 1; };
  const std::string what = text("checkpoint.dir: a checkpoint of this run needs ", needed, " bytes, and ", needed - 1, " are free in ");
  const Error refused = error_of([&] { run("second", sets); });
  EXPECT_EQ(refused.code(), ExitCode::environment);
  EXPECT_THAT(refused.what(), AllOf(HasSubstr(what), HasSubstr(folder_ / "runs: free some")));
  EXPECT_FALSE(fs::exists(run_folder("second")));
  EXPECT_THAT(log_of([&] { EXPECT_NO_THROW(preview_run(config("second", sets))); }), HasSubstr(what)) << "on this machine";
  free_now = [&] { return 3 * bytes; };
  EXPECT_THAT(
      log_of([&] { run("second", sets); }),
      AllOf(HasSubstr(text("checkpoint.dir: 3 checkpoints of ", bytes, " bytes lie side by side in this run, and ", 3 * bytes, " bytes")),
            HasSubstr("lower checkpoint.keep_latest")));
  free_now = [&] { return 3 * bytes + bytes / 10 + 1; };
  EXPECT_THAT(log_of([&] { run("third", sets); }), Not(HasSubstr("side by side")));
}

TEST_F(SmallDiskOfARun, WhatAResumeMayGiveUpForItsLastStateCounts) {
  const std::vector<std::string> sets = {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=2",
                                         "schedule.warmup_steps=1"};
  run("run", sets);
  const int64_t half = CheckpointReader(checkpoint("run", 4)).bytes() / 2;
  free_now = [half] { return half; };  // whatever is deleted
  const auto more = [&](const std::string& steps) { return run("run", {steps, "checkpoint.interval=0", "checkpoint.resume=auto"}); };
  EXPECT_EQ(more("training.steps=4").summary.exit, ExitCode::ok) << "all is saved";
  EXPECT_EQ(more("training.steps=5").summary.exit, ExitCode::storage);
  EXPECT_FALSE(fs::exists(checkpoint("run", 3))) << "which was given up";
  EXPECT_EQ(error_of([&] { more("training.steps=5"); }).code(), ExitCode::environment) << "the newest is not";
}

}  // namespace mantissa::test::save_room_test
