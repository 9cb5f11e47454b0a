// The length of a run that training.epochs gives.
#include <gmock/gmock.h>

#include "training.h"

namespace mantissa::run_length_test {

using test::error_of;
using test::read_file;
using test::TrainedRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RunLength : public test::TrainingTest {
 protected:
  static std::vector<int64_t> steps_of(const TrainedRun& run) {
    std::vector<int64_t> out;
    for (const StepEvent& step : run.steps) out.push_back(step.step);
    return out;
  }
  // The configuration of a run, read again with some more settings.
  LoadedConfig again(const std::string& name, std::vector<std::string> sets) const {
    return load_run_config({.file = run_folder(name) + "/config.json", .sets = std::move(sets)}, Inputs::must_exist, 0, Start::resumed);
  }
  std::function<Request()> stop_at(int64_t call) const {
    return [call, calls = int64_t{0}]() mutable { return ++calls == call ? Request::save_and_stop : Request::none; };
  }
};

// The text has 18,000 training tokens: 1,124 sequences of 16 with a token more, of which a step takes 8.
TEST_F(RunLength, OfEpochsFollowsFromTheSequencesOfTheData) {
  const std::vector<std::string> sets = {"training.steps=null", "training.epochs=0.05", "schedule.warmup_steps=2"};
  const TrainedRun straight = run("straight", sets);
  EXPECT_EQ(straight.summary.steps, 8) << "7.025, rounded up";
  EXPECT_EQ(straight.steps.front().steps, 8);
  EXPECT_LT(straight.steps.back().lr, straight.steps[2].lr / 2) << "the schedule ends with the run";
  const auto saved = nlohmann::json::parse(read_file(run_folder("straight") + "/config.json"));
  EXPECT_EQ(saved["training"]["steps"], 8);
  EXPECT_EQ(saved["training"]["epochs"], 0.05);
  LoadedConfig loaded = config("other", sets);
  EXPECT_EQ(loaded.config.training.steps, std::nullopt) << "the data are not open";
  EXPECT_EQ(loaded.report.origin("training.steps"), "derived");
  EXPECT_EQ(preview_run(loaded).config.training.steps, 8);
  resolve_by_data(loaded);
  EXPECT_EQ(loaded.config.training.steps, 8);
  EXPECT_EQ(loaded.config.model.vocab_size, 8);
}

TEST_F(RunLength, OfEpochsIsTheSameAfterAResume) {
  const std::vector<std::string> sets = {"training.steps=null", "training.epochs=0.05", "schedule.warmup_steps=2"};
  run("straight", sets);
  EXPECT_EQ(run(config("cut", sets), stop_at(4)).summary.exit, ExitCode::stopped);
  const TrainedRun rest = run(again("cut", {}));
  EXPECT_THAT(steps_of(rest), ElementsAre(4, 5, 6, 7, 8));
  EXPECT_TRUE(test::same_elements(state_of("cut", 8), state_of("straight", 8)));
  EXPECT_THAT(error_of([&] { again("cut", {"training.steps=9"}); }).what(), HasSubstr("training.epochs: is given beside training.steps 9"));
  EXPECT_EQ(run(again("cut", {"training.epochs=0.07"})).summary.steps, 10) << "the number in config.json is that of other epochs";
  EXPECT_EQ(run(again("cut", {"training.steps=11", "training.epochs=null"})).summary.steps, 11);
}

TEST_F(RunLength, OfEpochsCountsEachSetOnceWhateverItsWeight) {
  const std::string text = "{\"path\": \"" + (folder_ / "text.txt") + "\", \"weight\": ";
  const TrainedRun two = run("two", {"data.path=null", "data.train=[" + text + "1}, " + text + "9}]", "training.steps=null",
                                     "training.epochs=0.02", "schedule.warmup_steps=1"});
  EXPECT_EQ(two.summary.steps, 7) << "2 x 1,249 sequences x 0.02 / 8 = 6.2";
}

TEST_F(RunLength, OfEpochsThatIsTooShortForTheScheduleIsRefusedOnceTheDataAreOpen) {
  const std::vector<std::string> sets = {"training.steps=null", "training.epochs=0.05", "schedule.type=wsd", "schedule.decay_steps=4"};
  const Error error = error_of([&] { run("wsd", sets); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("schedule.decay_steps: wsd: warmup_steps 5 + decay_steps 4 exceed training.steps 8"));
  EXPECT_THAT(error.what(), HasSubstr("--set schedule.decay_steps=4"));
}

}  // namespace mantissa::run_length_test
