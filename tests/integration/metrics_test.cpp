// metrics.jsonl and TensorBoard have what the reports of a run say, and the reports say what is so.
#include <gmock/gmock.h>

#include <cstring>
#include <fstream>

#include "checkpoint/precision_setup.h"
#include "event_records.h"
#include "metrics/run_metrics.h"
#include "optim/optimizer.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::metrics_test {

using nlohmann::json;

struct Scalars {
  int64_t step;
  std::vector<TaggedValue> values;
};

class MetricsTest : public test::TrainingTest {
 protected:
  MetricsTest() {
    TrainEvents events;
    events.step = [this](const StepEvent& event) {
      steps_.push_back(event);
      scalars_.push_back({event.step,
                          {{"train/loss", static_cast<float>(event.loss.value())},
                           {"train/grad_norm", static_cast<float>(event.gradient_norm)},
                           {"train/lr", static_cast<float>(event.lr)},
                           {"perf/tokens_per_sec", static_cast<float>(event.tokens_per_second)},
                           {"mem/peak_gib", static_cast<float>(event.memory_gib)}}});
    };
    events.evaluated = [this](const EvaluationEvent& event) {
      evaluations_.push_back(event);
      scalars_.push_back({event.step, {{"valid/loss", static_cast<float>(event.result.loss)}}});
    };
    config_ = config("run", {"training.steps=8", "eval.interval=3", "logging.tensorboard=true"});
    summary_ = train(config_, {"test"}, events);
  }

  // The lines of metrics.jsonl of one type, without their times.
  std::vector<json> lines(const std::string& type) const {
    std::ifstream file(run_folder("run") + "/metrics.jsonl");
    std::vector<json> out;
    for (std::string line; std::getline(file, line);) {
      json parsed = json::parse(line);
      if (parsed["type"] != type) continue;
      EXPECT_EQ(parsed.erase("time"), 1U);
      out.push_back(std::move(parsed));
    }
    return out;
  }

  LoadedConfig config_;
  TrainSummary summary_;
  std::vector<StepEvent> steps_;
  std::vector<EvaluationEvent> evaluations_;
  std::vector<Scalars> scalars_;  // scalars of the reports, as TensorBoard should have them
};

TEST_F(MetricsTest, LinesHoldTheValuesOfTheReportsWhichAreReadBack) {
  const RunMetrics metrics = read_run_metrics(run_folder("run"));
  std::vector<json> steps, evaluations;
  const auto expect_read = [](const Series& series, size_t i, int64_t step, double value) {
    EXPECT_EQ(series.at(i).step, step);
    EXPECT_EQ(series.at(i).value, value);
  };
  for (const StepEvent& event : steps_) {
    const size_t i = steps.size();
    steps.push_back({{"type", "step"},
                     {"step", i + 1},
                     {"loss", event.loss.value()},
                     {"lr", event.lr},
                     {"grad_norm", event.gradient_norm},
                     {"tokens", event.tokens},
                     {"dt_ms", event.milliseconds},
                     {"tok_s", event.tokens_per_second},
                     {"mfu", nullptr},
                     {"mfu_meas", nullptr},
                     {"mem_gib", event.memory_gib},
                     {"eta_s", event.remaining_seconds},
                     {"skipped", false}});
    expect_read(metrics.loss, i, event.step, event.loss.value());
    expect_read(metrics.lr, i, event.step, event.lr);
    expect_read(metrics.gradient_norm, i, event.step, event.gradient_norm);
    expect_read(metrics.tokens_per_second, i, event.step, event.tokens_per_second);
  }
  for (const EvaluationEvent& event : evaluations_) {
    const SetLoss& set = event.result.sets.at(0);
    expect_read(metrics.valid_loss, evaluations.size(), event.step, event.result.loss);
    evaluations.push_back({{"type", "eval"},
                           {"step", event.step},
                           {"loss", event.result.loss},
                           {"targets", event.result.targets},
                           {"sets", {{{"name", set.name}, {"loss", set.loss}, {"targets", set.targets}}}},
                           {"seconds", event.seconds}});
  }
  ASSERT_EQ(steps_.size(), 8U);
  ASSERT_EQ(evaluations_.size(), 3U) << "3, 6 and the last";
  EXPECT_EQ(lines("step"), steps);
  EXPECT_EQ(lines("eval"), evaluations);
  EXPECT_EQ(metrics.tokens, steps_.back().tokens);
}

TEST_F(MetricsTest, TensorBoardHoldsTheValuesOfTheReports) {
  std::vector<std::string> records;
  for (const auto& entry : std::filesystem::directory_iterator(run_folder("run"))) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) records = test::records_of(test::read_file(entry.path()));
  }
  ASSERT_EQ(records.size(), scalars_.size() + 1) << "the version comes first";
  for (size_t i = 0; i < scalars_.size(); ++i) {
    double wall_time = 0;
    std::memcpy(&wall_time, records[i + 1].data() + 1, sizeof wall_time);
    EXPECT_EQ(records[i + 1], scalar_event(scalars_[i].step, wall_time, scalars_[i].values)) << "record " << i;
  }
}

TEST_F(MetricsTest, ReportsSayWhatIsSo) {
  RunConfig config = config_.config;
  Throughput speed;
  double seconds = 0;
  for (const StepEvent& event : steps_) {
    EXPECT_EQ(event.lr, learning_rate(config.schedule, config.optimizer.lr, 8, event.step - 1)) << event.step;
    EXPECT_EQ(event.tokens, 128 * event.step);
    seconds += event.milliseconds / 1e3;
    speed.add(128, event.milliseconds / 1e3);
    EXPECT_NEAR(event.tokens_per_second, speed.tokens_per_second(), 1e-9 * speed.tokens_per_second()) << event.step;
    EXPECT_NEAR(event.remaining_seconds, speed.seconds_per_step() * static_cast<double>(8 - event.step), 1e-9) << event.step;
  }
  EXPECT_GT(seconds, 0);
  EXPECT_LT(seconds, summary_.seconds);
  EXPECT_EQ(evaluations_.back().result.loss, summary_.last_valid_loss);
  // Loss and norm are those of the step.
  Data data = open_data(config.data, {.seq_len = 16, .seed = config.training.seed});
  config.model.vocab_size = data.vocab_size;
  const auto device = make_backend("cpu");
  Gpt model(config.model, *device, resolve_plan(config), {.recompute = config.training.recompute, .gradients = true});
  Optimizer optimizer(model.parameters(), config.optimizer);
  optimizer.initialize(config.training.seed);
  GradientAccumulator accumulator(model.parameters(), config.training.accumulation, 2);
  const StepResult first = training_step(model, optimizer, accumulator, data.train->batch(0, 8), 4, 0.0);
  EXPECT_EQ(steps_[0].loss, first.loss);
  EXPECT_EQ(steps_[0].gradient_norm, first.gradient_norm);
}

TEST_F(MetricsTest, ALongRunIsToldInSharesOfTheRateOfGemmsThatItMeasured) {
  std::vector<StepEvent> steps;
  TrainEvents events;
  events.step = [&](const StepEvent& event) { steps.push_back(event); };
  events.request = [&] { return steps.size() < 3 ? Request::none : Request::save_and_stop; };
  const LoadedConfig loaded = config("long", {"training.steps=1000000000", "schedule.type=constant", "logging.tensorboard=true"});
  train(loaded, {"test"}, events);
  ASSERT_EQ(steps.size(), 3U);
  for (const StepEvent& event : steps) {
    ASSERT_TRUE(event.mfu_measured);
    EXPECT_GT(*event.mfu_measured, 0.0);
    EXPECT_FALSE(event.mfu);
  }
  const double rate = steps[1].tokens_per_second / *steps[1].mfu_measured, later = steps[2].tokens_per_second / *steps[2].mfu_measured;
  EXPECT_NEAR(rate, later, 1e-9 * rate) << "one measurement for the run";
}

}  // namespace mantissa::metrics_test
