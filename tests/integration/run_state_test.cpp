// State that a run keeps from step to step and over a resume: steps that are not finite, the best loss, its place in the data. Reads of a
// resume, their times, and messages about settings that changed.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "training.h"

namespace mantissa::run_state_test {

using test::error_of;
using test::read_file;
using test::TrainedRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A request to stop after so many steps of one call of train().
std::function<Request()> stop_after(int64_t steps) {
  return [steps, calls = int64_t{0}]() mutable { return ++calls > steps ? Request::save_and_stop : Request::none; };
}

// ---- steps that are not finite

class BadSteps : public test::TrainingTest {
 protected:
  // From here on the loss of a step is infinite if and only if it is one of `bad`: the first of its sequences has a z among its targets,
  // whose logit is -inf at every position, because the output layer sees ones. Its weights for z are finite.
  void mark(const std::vector<int64_t>& bad) const {
    std::string content = test::second_order_text(20000);
    content[0] = 'z';  // known to the tokenizer, and no target
    test::write_file(folder_ / "text.txt", content);
    const RunConfig config = bad_config("order").config;
    Data data = open_data(config.data, {.seq_len = 16, .seed = config.training.seed});
    for (const int64_t step : bad) content[static_cast<size_t>(16 * data.train->batch(8 * (step - 1), 1).samples[0].sample) + 8] = 'z';
    test::write_file(folder_ / "text.txt", content);
    run("seed", {"training.steps=1", "model.norm=layer", "model.norm_bias=true"});
    save_changed("seed", 1, "steep", [](Gpt& model, CheckpointContent&) {
      const auto fill = [](const Tensor& tensor, double value) { tensor.device().run(Fill{.out = tensor, .value = value}); };
      fill(model.parameters().find("final_norm.weight")->value(), 0);
      fill(model.parameters().find("final_norm.bias")->value(), 1);
      fill(model.parameters().find("output.weight")->value().slice(8, 9), -3e38);
    });
  }

  LoadedConfig bad_config(const std::string& name, std::vector<std::string> sets = {}) const {
    std::filesystem::create_directories(folder_ / "steep");
    sets.insert(sets.end(),
                {"model.norm=layer", "model.norm_bias=true", "training.steps=12", "checkpoint.init_from=" + (folder_ / "steep")});
    return config(name, sets);
  }

  static std::vector<int64_t> skipped(const TrainedRun& run) {
    std::vector<int64_t> out;
    for (const StepEvent& step : run.steps) {
      if (step.skipped) out.push_back(step.step);
    }
    return out;
  }
};

TEST_F(BadSteps, ThoseInARowCountAcrossAResume) {
  mark({3, 4, 5});
  EXPECT_EQ(run(bad_config("row"), stop_after(4)).summary.exit, ExitCode::stopped);
  const Error error = error_of([&] { run(bad_config("row", {"checkpoint.resume=auto"})); });
  EXPECT_EQ(error.code(), ExitCode::numerical);
  EXPECT_THAT(error.what(), HasSubstr("stopped at step 5: 3 steps in a row"));
}

// Skipped steps count for the limit of three only where they are in a row.
TEST_F(BadSteps, SkippedStepsAreCountedAcrossAResume) {
  mark({2, 3, 5, 6, 8, 9, 11});
  const TrainedRun straight = run(bad_config("straight"));
  EXPECT_EQ(straight.summary.exit, ExitCode::ok);
  EXPECT_THAT(skipped(straight), ElementsAre(2, 3, 5, 6, 8, 9, 11));
  EXPECT_EQ(run(bad_config("part"), stop_after(4)).summary.skipped_steps, 2);
  const TrainedRun rest = run(bad_config("part", {"checkpoint.resume=auto"}));
  EXPECT_THAT(skipped(rest), ElementsAre(5, 6, 8, 9, 11));
  EXPECT_EQ(rest.summary.skipped_steps, 7);
  EXPECT_TRUE(test::same_elements(state_of("part", 12), state_of("straight", 12)));
}

// ---- the best loss

class RunState : public test::TrainingTest {
 protected:
  // The log of what `body` does.
  template <class Body>
  std::string log_of(Body&& body) const {
    open_log({.console = false, .file = folder_ / "log.txt"});
    body();
    close_log();
    std::string content = read_file(folder_ / "log.txt");
    std::filesystem::remove(folder_ / "log.txt");
    return content;
  }
};

// The loss falls, and after a resume with a rate far too high it rises: neither the first nor the last stands for the best.
TEST_F(RunState, BestLossIsTheLeastOfAllEvaluationsAlsoOfThoseBeforeAResume) {
  std::vector<EvaluationEvent> reports;
  TrainEvents events;
  events.evaluated = [&reports](const EvaluationEvent& event) { reports.push_back(event); };
  events.request = [&reports] { return reports.size() == 6 ? Request::save_and_stop : Request::none; };
  const TrainSummary first = train(config("run", {"eval.interval=1", "training.steps=12"}), {}, events);
  ASSERT_EQ(first.exit, ExitCode::stopped);
  events.request = {};
  const TrainSummary all =
      train(config("run", {"eval.interval=1", "training.steps=12", "optimizer.lr=2", "checkpoint.resume=auto"}), {}, events);
  ASSERT_EQ(reports.size(), 12U);
  double best = HUGE_VAL;
  for (size_t i = 0; i < reports.size(); ++i) {
    const double loss = reports[i].result.loss;
    EXPECT_EQ(reports[i].best, loss < best) << "evaluation " << i;
    best = std::min(best, loss);
  }
  EXPECT_EQ(all.best_valid_loss, best);
  EXPECT_EQ(all.last_valid_loss, reports.back().result.loss);
  EXPECT_LT(best, reports.front().result.loss) << "else this shows nothing";
  EXPECT_EQ(first.best_valid_loss, best) << "else this shows nothing";
}

// ---- what the seed decides beside the weights

TEST_F(RunState, TheSeedDecidesTheOrderOfTheDataAndTheDrawsOfSamplesUnderEqualWeights) {
  run("first", {"training.steps=1"});
  const auto with_seed = [&](const std::string& name, int seed) {
    return run(name, {"checkpoint.init_from=" + run_folder("first"), text("training.seed=", seed), "training.steps=2", "optimizer.lr=1e-12",
                      R"(eval.samples={"prompts": ["ab", "ab"], "interval": 1, "temperature": 9, "top_k": 0, "max_new_tokens": 40})"});
  };
  const TrainedRun one = with_seed("one", 1), again = with_seed("again", 1), two = with_seed("two", 2);
  EXPECT_TRUE(test::same_elements(again.losses, one.losses));
  EXPECT_NE(two.losses, one.losses);
  EXPECT_EQ(again.samples, one.samples);
  ASSERT_EQ(one.samples.size(), 4U);
  std::set<std::string> different(one.samples.begin(), one.samples.end());
  different.insert(two.samples.begin(), two.samples.end());
  EXPECT_EQ(different.size(), 8U) << "equal prompts, later steps and other seeds draw other numbers";
}

// ---- resuming

TEST_F(RunState, WeightsOfARunWithAnotherTokenizerAreRefused) {
  run("first", {"training.steps=1"});
  std::string shifted = test::second_order_text(20000);
  for (char& letter : shifted) ++letter;  // as many characters, and other ones
  test::write_file(folder_ / "shifted.txt", shifted);
  const std::string init = "checkpoint.init_from=" + run_folder("first");
  const Error error = error_of([&] { run("other", {init, "data.path=" + (folder_ / "shifted.txt")}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_THAT(error.what(), HasSubstr("was trained with a tokenizer that differs from data.tokenizer"));
  EXPECT_FALSE(std::filesystem::exists(run_folder("other")));
}

TEST_F(RunState, NothingIsReadBeforeTheFolderIsLocked) {
  run("locked", {"training.steps=1"});
  const FolderLock lock(run_folder("locked") + "/checkpoints", "other");
  for (const std::string& resume : {std::string("auto"), checkpoint("locked", 1)}) {
    const Error error = error_of([&] { run("locked", {"training.steps=2", "model.intermediate_size=64", "checkpoint.resume=" + resume}); });
    EXPECT_EQ(error.code(), ExitCode::environment) << "a checkpoint of another model was read: " << error.what();
    EXPECT_THAT(error.what(), HasSubstr("is in use by")) << resume;
  }
}

TEST_F(RunState, ResumeSaysWhichSettingsAndWhetherTheBuildChanged) {
  run("first", {"training.steps=2"});
  const std::string path = checkpoint("first", 2);
  std::vector<std::string> sets = {"training.steps=3", "checkpoint.resume=" + path};
  const std::string same = log_of([&] { run("same", sets); });
  EXPECT_THAT(same, HasSubstr("changed since the checkpoint: training.steps: 2 in the checkpoint, 3 here"));
  EXPECT_EQ(same.find("changed since"), same.rfind("changed since")) << same;
  EXPECT_THAT(same, Not(HasSubstr("another build")));

  Manifest manifest = CheckpointReader(path).manifest();
  manifest.fingerprints.build = "an old compiler";
  test::write_file(path + "/manifest.json", format_manifest(manifest));
  std::filesystem::copy(folder_ / "text.txt", folder_ / "copy.txt");
  const std::vector<std::pair<std::string, std::string>> changes = {
      {"precision.report_interval=7", "precision.report_interval: 0"},
      {"optimizer.lr=0.25", "optimizer.lr: 0.01"},
      {"optimizer.weight_decay=0.5", "optimizer.weight_decay: 0.1"},
      {"schedule.warmup_steps=6", "schedule.warmup_steps: 5"},
      {"schedule.type=linear", "schedule.type: cosine"},
      {"training.nonfinite_limit=9", "training.nonfinite_limit: 3"},
      {"data.path=" + (folder_ / "copy.txt"), "data.path: " + (folder_ / "text.txt")}};
  for (const auto& [set, line] : changes) sets.push_back(set);
  TrainedRun resumed;
  const std::string changed = log_of([&] { resumed = run("changed", sets); });
  ASSERT_EQ(resumed.steps.size(), 1U);
  EXPECT_NEAR(resumed.steps[0].lr, 0.25 * 3 / 7, 1e-9) << "what is set here is what counts";
  for (const auto& [set, line] : changes) {
    EXPECT_THAT(changed,
                HasSubstr("changed since the checkpoint: " + line + " in the checkpoint, " + set.substr(set.find('=') + 1) + " here"));
  }
  EXPECT_THAT(changed, HasSubstr("the checkpoint was written by another build (an old compiler; this one: "));
}

}  // namespace mantissa::run_state_test
