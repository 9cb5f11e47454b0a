// The length of a run that training.epochs gives, and what a run reports besides the lines of its intervals: the evaluation of what it
// starts from, and its first step.
#include <gmock/gmock.h>

#include "checkpoint/checkpoint_search.h"
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

// The steps before took 8 sequences each, so as many steps as 7.025 batches of 16 would be end in the middle.
TEST_F(RunLength, OfEpochsIsNotThatOfAnotherBatchOnAResume) {
  const std::vector<std::string> sets = {"training.steps=null", "training.epochs=0.05", "schedule.warmup_steps=2"},
                                 wide = {"training.grad_accum=null", "training.global_batch_size=16"};
  EXPECT_EQ(run(config("cut", sets), stop_at(4)).summary.exit, ExitCode::stopped);
  const auto refused = [&](const std::vector<std::string>& more) {
    const Error error = error_of([&] { run(again("cut", more)); });
    EXPECT_EQ(error.code(), ExitCode::usage);
    return std::string(error.what());
  };
  EXPECT_THAT(refused(wide), HasSubstr("training.epochs: 0.05 are 4 steps of 16 sequences, but " + run_folder("cut")));
  EXPECT_THAT(refused(wide), HasSubstr("has taken 24 in 3 steps; set training.epochs to null and training.steps to 6, with which"));
  const auto steps = test::with(wide, {"training.epochs=null", "training.steps=6"});
  EXPECT_EQ(run(again("cut", steps)).summary.steps, 6) << "24 + 3 x 16 = 72 of 56.2 sequences";
  EXPECT_THAT(refused(test::with(wide, {"training.steps=null", "training.epochs=0.1"})), HasSubstr("has taken 72 in 6 steps"));
  EXPECT_EQ(run(again("cut", test::with(wide, {"training.epochs=null", "training.steps=7"}))).summary.steps, 7);
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

TEST_F(RunLength, TheFirstStepOfAProcessIsReportedWhateverTheInterval) {
  const std::vector<std::string> sets = {"logging.interval=6", "training.steps=14"};
  EXPECT_THAT(steps_of(run("straight", sets)), ElementsAre(1, 6, 12, 14));
  EXPECT_THAT(steps_of(run(config("cut", sets), stop_at(8))), ElementsAre(1, 6));
  EXPECT_THAT(steps_of(run(again("cut", {}))), ElementsAre(8, 12, 14));
}

// ---- the evaluation before the first step

class FirstEvaluation : public RunLength {
 protected:
  struct Seen {
    std::vector<int64_t> steps;
    std::vector<double> losses;
  };
  // The evaluations of a run.
  Seen evaluations(const LoadedConfig& config, std::function<Request()> request = {}) const {
    Seen seen;
    TrainEvents events;
    events.evaluated = [&seen](const EvaluationEvent& event) {
      seen.steps.push_back(event.step);
      seen.losses.push_back(event.result.loss);
    };
    events.request = std::move(request);
    train(config, {}, events);
    return seen;
  }
};

TEST_F(FirstEvaluation, IsOfTheStartAndChangesNothingElse) {
  const std::vector<std::string> sets = {"eval.interval=2", "checkpoint.interval=2", "training.steps=4"};
  const Seen without = evaluations(config("without", sets)), with = evaluations(config("with", test::with(sets, {"eval.first=true"})));
  EXPECT_THAT(with.steps, ElementsAre(0, 2, 4));
  EXPECT_EQ(std::vector(with.losses.begin() + 1, with.losses.end()), without.losses);
  EXPECT_NEAR(with.losses[0], std::log(8.0), 0.1) << "it knows nothing yet";
  const auto saved = list_checkpoints(run_folder("with") + "/checkpoints");
  ASSERT_EQ(saved.size(), 2U) << "nothing was to be saved before the first step";
  EXPECT_EQ(saved[0].step, 2);
  EXPECT_THAT(read_file(run_folder("with") + "/metrics.jsonl"), HasSubstr(R"({"type":"eval","step":0,)"));
  const Seen more = evaluations(config("more", test::with(sets, {"eval.first=true", "checkpoint.init_from=" + run_folder("with")})));
  EXPECT_EQ(more.losses[0], with.losses.back()) << "that of the model which the run starts from";
}

TEST_F(FirstEvaluation, ThatIsCutIsDoneByTheResumeAndNoneIsDoneTwice) {
  const std::vector<std::string> sets = {"eval.first=true", "eval.iters=4", "eval.interval=3", "training.steps=3"};
  const Seen straight = evaluations(config("straight", sets));
  EXPECT_THAT(evaluations(config("cut", sets), stop_at(2)).steps, ElementsAre());
  const Seen rest = evaluations(again("cut", {}));
  EXPECT_THAT(rest.steps, ElementsAre(0, 3));
  EXPECT_EQ(rest.losses, straight.losses);
  EXPECT_THAT(evaluations(again("cut", {"training.steps=6"})).steps, ElementsAre(6));
}

// Evaluations at 0, 2, 4 and the end, 5; the last one is counted once where the interval ends with the run.
TEST_F(FirstEvaluation, IsCountedBeforeTheRun) {
  const auto flops = [&](const std::vector<std::string>& more) {
    return preview_run(config("preview", test::with({"eval.interval=2"}, more))).evaluation_flops;
  };
  const double one = flops({"training.steps=1"});
  ASSERT_GT(one, 0.0);
  EXPECT_DOUBLE_EQ(flops({"training.steps=5"}), 3 * one);
  EXPECT_DOUBLE_EQ(flops({"training.steps=6"}), 3 * one);
  EXPECT_DOUBLE_EQ(flops({"training.steps=5", "eval.first=true"}), 4 * one);
}

TEST_F(FirstEvaluation, NeedsValidationData) {
  const std::string text = "data.train=[{\"path\": \"" + (folder_ / "text.txt") + "\"}]";
  for (const std::string key : {"eval.first", "checkpoint.keep_best"}) {
    for (const std::vector<std::string>& none :
         {std::vector<std::string>{"data.valid_fraction=0"}, std::vector<std::string>{"data.path=null", text}}) {
      const Error error = error_of([&] { config("none", test::with(none, {key + "=true"})); });
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_THAT(error.what(), HasSubstr(key + ": needs validation data: data.valid, or with data.path a data.valid_fraction above 0"));
    }
  }
}

}  // namespace mantissa::run_length_test
