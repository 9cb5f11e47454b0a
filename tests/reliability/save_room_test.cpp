// A disk that is too small for the checkpoints of a run: it is told before the first step, and the last state is worth more than the oldest
// checkpoint that only keep_latest keeps.
#include <gmock/gmock.h>

#include "base/file.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint_testing.h"
#include "mantissa/base/log.h"
#include "reliability/fault_injection.h"
#include "thread_ranks.h"
#include "train/run.h"
#include "training.h"

namespace mantissa::test::save_room_test {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
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
  EXPECT_THAT(log(), HasSubstr("step-00000001: deleted, because the disk does not have room for it beside the checkpoint of step 4"));
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

TEST_F(SmallDisk, TheLastStateOfSeveralRanksGetsThePlaceOfAllButOne) {
  const auto saved = [this](int64_t step, AfterSave after) {
    return run_ranks(2, [&, this](const Communicator& world) {
      std::optional<CheckpointDirectory> directory;
      if (world.rank() == 0) directory.emplace(open_directory(folder, {.latest = 3}));
      CheckpointContent content = State(step).content();  // each rank has one of its tensors
      content.tensors.erase(content.tensors.begin() + world.rank());
      save_together(
          world, directory, content, [] {}, after);
    });
  };
  for (const int64_t step : {1, 2}) open_directory(folder, {.latest = 3}).save(State(step).content());
  set_size(2 * kState + kState / 2);
  EXPECT_THAT(saved(3, AfterSave::run_goes_on), Each(Not(IsEmpty())));
  EXPECT_THAT(steps(), ElementsAre("step-00000001", "step-00000002"));
  EXPECT_THAT(saved(4, AfterSave::run_ends), Each(IsEmpty()));
  EXPECT_THAT(steps(), ElementsAre("step-00000002", "step-00000004"));
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

TEST_F(SmallDisk, TheBestStays) {
  CheckpointDirectory directory = open_directory(folder, {.latest = 9});
  directory.name_best(directory.save(State(1).content()));
  for (const int64_t step : {2, 3}) directory.save(State(step).content());
  set_size(3 * kState + kState / 2);
  EXPECT_EQ(save(directory, 4, AfterSave::run_ends), ExitCode::ok);
  EXPECT_THAT(steps(), ElementsAre("step-00000001", "step-00000003", "step-00000004"));
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
  const std::string what = text("checkpoint.dir: a checkpoint of this run needs ", needed, " bytes, but ", needed - 1, " are free in ");
  const Error refused = error_of([&] { run("second", sets); });
  EXPECT_EQ(refused.code(), ExitCode::environment);
  EXPECT_THAT(refused.what(), AllOf(HasSubstr(what), HasSubstr(folder_ / "runs: free some")));
  EXPECT_FALSE(fs::exists(run_folder("second")));
  const Error dry = error_of([&] { preview_run(config("second", sets)); });
  EXPECT_EQ(dry.code(), ExitCode::environment);
  EXPECT_STREQ(dry.what(), refused.what());
  free_now = [&] { return 3 * bytes; };
  EXPECT_THAT(
      log_of([&] { run("second", sets); }),
      AllOf(HasSubstr(text("checkpoint.dir: this run keeps up to 3 checkpoints of ", bytes, " bytes at a time, but ", 3 * bytes, " bytes")),
            HasSubstr("lower checkpoint.keep_latest")));
  free_now = [&] { return 3 * bytes + bytes / 10 + 1; };
  EXPECT_THAT(log_of([&] { run("third", sets); }), Not(HasSubstr("at a time")));
}

// The first step changes the weights, the others do not. The best state is not on the disk, so the next one that is as good takes its
// place.
TEST_F(SmallDiskOfARun, LosesTheBestAndKeepsTheNextThatIsBetterThanTheOneThere) {
  const LoadedConfig loaded =
      config("run", {"training.steps=3", "schedule.warmup_steps=0", "schedule.type=linear", "schedule.decay_steps=1",
                     "schedule.min_lr_ratio=0", "eval.first=true", "eval.interval=1", "checkpoint.keep_best=true"});
  bool full = false;
  free_now = [&] { return full ? int64_t{0} : int64_t{1} << 40; };
  std::vector<double> losses;
  TrainEvents events;
  events.evaluated = [&](const EvaluationEvent& event) {
    losses.push_back(event.result.loss);
    full = event.step == 1;
  };
  const TrainSummary summary = train(loaded, {}, events);
  EXPECT_EQ(summary.failed_saves, 1);
  ASSERT_EQ(losses.size(), 4U);
  ASSERT_LT(losses[1], losses[0]);
  ASSERT_EQ(losses[2], losses[1]);
  EXPECT_EQ(load_checkpoint(run_folder("run") + "/checkpoints/best", [](CheckpointReader&) {}).step, 2);
}

TEST_F(SmallDiskOfARun, HasRoomForTheBestBesideTheLatest) {
  RunConfig config = this->config("run", {"training.steps=40", "checkpoint.interval=10", "checkpoint.keep_latest=2"}).config;
  EXPECT_EQ(most_new_checkpoints(config, 0, 0), 3) << "a new one is written before the oldest goes";
  config.checkpoint.keep_best = true;
  EXPECT_EQ(most_new_checkpoints(config, 0, 0), 4);
  config.checkpoint.interval = 0;
  EXPECT_EQ(most_new_checkpoints(config, 0, 0), 1) << "that of the end";
  config.eval.interval = 20;
  EXPECT_EQ(most_new_checkpoints(config, 0, 0), 3) << "20, 40 and the end, as each may be the best";
  config.eval.first = true;
  EXPECT_EQ(most_new_checkpoints(config, 0, 0), 4);
  EXPECT_EQ(most_new_checkpoints(config, 20, 2), 2);
  EXPECT_EQ(most_new_checkpoints(config, 20, 0), 2) << "the evaluation before the first step is over";
}

// The best gives its place to nothing, so it is no room for the last state.
TEST_F(SmallDiskOfARun, TheBestIsNotCountedAsRoom) {
  const std::vector<std::string> sets = {"checkpoint.interval=1", "checkpoint.keep_latest=2", "schedule.warmup_steps=1", "optimizer.lr=2"};
  run("run", with(sets, {"training.steps=3", "checkpoint.keep_best=true", "eval.first=true"}));
  ASSERT_THAT(steps_in(run_folder("run") + "/checkpoints"), ElementsAre(0, 2, 3)) << "the loss rises";
  fs::remove_all(checkpoint("run", 2));
  const int64_t bytes = CheckpointReader(checkpoint("run", 3)).bytes();
  free_now = [&] { return bytes / 2; };
  const Error refused = error_of([&] { run("run", with(sets, {"training.steps=5", "checkpoint.resume=auto"})); });
  EXPECT_EQ(refused.code(), ExitCode::environment);
  EXPECT_TRUE(fs::exists(checkpoint("run", 0)));
}

// A checkpoint is kept until its export is there: for the last state the run waits for that.
TEST_F(SmallDiskOfARun, TheLastStateGetsThePlaceOfACheckpointWhoseExportIsPending) {
  const std::vector<std::string> sets = {"training.steps=3",        "checkpoint.interval=1", "checkpoint.keep_latest=2",
                                         "schedule.warmup_steps=1", "checkpoint.export={}",  "logging.interval=100"};
  run("first", sets);
  const int64_t bytes = CheckpointReader(checkpoint("first", 3)).bytes();
  const fs::path saved = run_folder("second") + "/checkpoints";
  free_now = [&] {  // no export is looked after between the saves, so those of steps 1 and 2 are pending at step 3
    const auto count =
        fs::exists(saved) ? std::ranges::count_if(names_in(saved), [](const auto& name) { return name.starts_with("step-"); }) : 0;
    return std::max<int64_t>(0, 5 * bytes / 2 - bytes * count);
  };
  EXPECT_THAT(log_of([&] {
                const TrainSummary summary = run("second", sets).summary;
                EXPECT_EQ(summary.exit, ExitCode::ok);
                EXPECT_EQ(summary.failed_saves, 0);
              }),
              HasSubstr("checkpoint of step 3 is not saved yet: "));
  EXPECT_FALSE(fs::exists(checkpoint("second", 1)));
  EXPECT_TRUE(fs::exists(checkpoint("second", 3)));
  EXPECT_TRUE(fs::exists(run_folder("second") + "/exports/step-00000003"));
}

TEST_F(SmallDiskOfARun, WhatAResumeMayGiveUpForItsLastStateCounts) {
  const std::vector<std::string> sets = {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=2",
                                         "schedule.warmup_steps=1"};
  run("run", sets);
  const int64_t half = CheckpointReader(checkpoint("run", 4)).bytes() / 2;
  const auto more = [&](const std::string& steps) { return run("run", {steps, "checkpoint.interval=0", "checkpoint.resume=auto"}); };
  free_now = [] { return 0; };
  EXPECT_EQ(more("training.steps=4").summary.exit, ExitCode::ok) << "all is saved";
  free_now = [half] { return half; };  // whatever is deleted
  EXPECT_EQ(more("training.steps=5").summary.exit, ExitCode::storage);
  EXPECT_FALSE(fs::exists(checkpoint("run", 3))) << "which was given up";
  EXPECT_EQ(error_of([&] { more("training.steps=5"); }).code(), ExitCode::environment) << "the newest is not";
}

// Neither what keep_every keeps nor what is later than the step from which the run goes on gives its place to a new one.
TEST_F(SmallDiskOfARun, OnlyCheckpointsThatMayGoAreReplaced) {
  const std::vector<std::string> sets = {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=4",
                                         "schedule.warmup_steps=1"};
  run("run", sets);
  const int64_t bytes = CheckpointReader(checkpoint("run", 4)).bytes();
  const std::string old = "checkpoint.resume=" + checkpoint("run", 2);
  free_now = [&] { return bytes / 20; };
  for (const std::vector<std::string>& more : {std::vector<std::string>{"checkpoint.resume=auto", "checkpoint.keep_every=1"}, {old}}) {
    std::vector<std::string> all = {"training.steps=5", "schedule.warmup_steps=1"};
    all.insert(all.end(), more.begin(), more.end());
    EXPECT_EQ(error_of([&] { run("run", all); }).code(), ExitCode::environment) << more[0];
  }
  // Steps 2 and 4 stay, so that 5, 6 and 7 lie beside them.
  for (const int64_t step : {1, 3}) fs::remove_all(checkpoint("run", step));
  const auto warned = [&](const std::string& name, int64_t free, const std::vector<std::string>& more) {
    free_now = [free] { return free; };
    std::vector<std::string> all = {"checkpoint.interval=1", "schedule.warmup_steps=1"};
    all.insert(all.end(), more.begin(), more.end());
    return log_of([&] { EXPECT_NO_THROW(preview_run(config(name, all))); });
  };
  const auto side_by_side = [](int64_t count) {
    return HasSubstr(text("checkpoint.dir: this run keeps up to ", count, " checkpoints of "));
  };
  EXPECT_THAT(
      warned("run", 3 * bytes, {"training.steps=7", "checkpoint.keep_latest=2", "checkpoint.keep_every=2", "checkpoint.resume=auto"}),
      side_by_side(3));
  EXPECT_THAT(warned("run", 2 * bytes, {"training.steps=9", "checkpoint.keep_latest=3", "checkpoint.resume=auto"}), side_by_side(2));
  flip_byte(checkpoint("run", 2) + "/manifest.json", 5);  // one that is damaged is not counted, and stays
  EXPECT_THAT(warned("run", 3 * bytes, {"training.steps=9", "checkpoint.keep_latest=3", "checkpoint.resume=auto"}), side_by_side(3));
  // In another folder, the steps before the checkpoint bring no saves, and there are none that go.
  EXPECT_THAT(warned("other", 2 * bytes, {"training.steps=5", old.substr(0, old.size() - 1) + "4"}), Not(HasSubstr("at a time")));
  EXPECT_THAT(warned("other", 3 * bytes, {"training.steps=9", old.substr(0, old.size() - 1) + "4"}), side_by_side(4));
}

TEST_F(SmallDiskOfARun, AFinishedRunThatGoesOnElsewhereSavesOnceMore) {
  run("run", {"training.steps=2", "schedule.warmup_steps=1"});
  const int64_t bytes = CheckpointReader(checkpoint("run", 2)).bytes();
  const std::vector<std::string> last = {"training.steps=2", "schedule.warmup_steps=1", "checkpoint.interval=1",
                                         "checkpoint.resume=" + checkpoint("run", 2)};
  const auto preview = [&](int64_t free, const std::string& more) {
    free_now = [free] { return free; };
    std::vector<std::string> all = last;
    all.push_back(more);
    return log_of([&] { preview_run(config("other", all)); });
  };
  EXPECT_EQ(error_of([&] { preview(room_for(bytes) - 1, "checkpoint.keep_latest=2"); }).code(), ExitCode::environment);
  EXPECT_THAT(preview(room_for(bytes) + 1, "checkpoint.keep_latest=2"), Not(HasSubstr("at a time")));
  EXPECT_THAT(preview(room_for(bytes) + 1, "checkpoint.export={}"), HasSubstr("checkpoint.dir: this run keeps up to 1 checkpoint of "));
}

// Exports lie in the run folder, which need not be on the disk of the checkpoints.
TEST_F(SmallDiskOfARun, ExportsCountOnTheDiskOfTheCheckpoints) {
  run("first", {"training.steps=2", "schedule.warmup_steps=1"});
  const int64_t bytes = CheckpointReader(checkpoint("first", 2)).bytes(), room = 3 * bytes + bytes / 10 + 1;
  free_now = [room] { return room; };
  const auto preview = [&](const std::string& run_folder) {
    return log_of([&] {
      preview_run(config("exports", {"training.steps=4", "schedule.warmup_steps=1", "checkpoint.interval=1", "checkpoint.keep_latest=2",
                                     "checkpoint.export={}", "logging.dir=" + run_folder, "checkpoint.dir=" + (folder_ / "saved")}));
    });
  };
  EXPECT_THAT(preview(folder_ / "run"), HasSubstr("checkpoint.dir: this run keeps up to 3 checkpoints of "));
  EXPECT_THAT(preview(folder_ / "run"), HasSubstr("with their exports at a time"));
  EXPECT_THAT(preview("/proc/run"), Not(HasSubstr("at a time"))) << "another disk, on which a dry run makes nothing";
}

TEST_F(SmallDiskOfARun, ARequestToStopMakesItsSaveTheLastOne) {
  run("run", {"training.steps=4", "checkpoint.interval=1", "checkpoint.keep_latest=2", "schedule.warmup_steps=1"});
  const int64_t half = CheckpointReader(checkpoint("run", 4)).bytes() / 2;
  free_now = [half] { return half; };
  const auto request = [calls = 0]() mutable { return ++calls == 2 ? Request::save_and_stop : Request::none; };
  run(config("run", {"training.steps=9", "checkpoint.interval=0", "checkpoint.resume=auto"}), request);
  EXPECT_FALSE(fs::exists(checkpoint("run", 3))) << "all but the newest may go for it";
  EXPECT_TRUE(fs::exists(checkpoint("run", 4)));
}

}  // namespace mantissa::test::save_room_test
