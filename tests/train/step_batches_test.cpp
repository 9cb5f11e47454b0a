// The next batch is read and uploaded while a device computes: this changes when data is read, and no result.
#include <gmock/gmock.h>

#include "async_device.h"
#include "mantissa/backend/functions.h"
#include "train/training_step.h"
#include "training_on_ranks.h"

namespace mantissa::step_batches_test {

using test::Sets;
using test::TrainedRun;
using test::with;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Writes down what it is asked for: u an upload, U an update of a parameter, d a download.
class LoggedDevice final : public test::ClosedDevice {
 public:
  explicit LoggedDevice(std::string& log) : log_(log) {}
  void upload(const void* from, const Tensor& to) override { log_ += 'u', ClosedDevice::upload(from, to); }
  std::function<void(void* to)> begin_download(const Tensor& from) override {
    log_ += 'a';
    return [this, here = ClosedDevice::begin_download(from)](void* to) { log_ += 'd', here(to); };
  }

 protected:
  using ClosedDevice::execute;
  void execute(const AdamW& k) override { log_ += 'U', ClosedDevice::execute(k); }

 private:
  std::string& log_;
};

// Tokens of a file, which a test can cut.
class StepBatchesTest : public test::TrainingOnRanks {
 protected:
  StepBatchesTest() { write_tokens(); }
  void write_tokens() const {
    std::vector<uint16_t> ids(2000);
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<uint16_t>(random_words({.seed = 3, .stream = RngStream::test}, 1, i)[0] % 8);
    test::write_file(folder_ / "tokens.bin", {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(uint16_t)});
  }
  void cut_tokens() const { std::filesystem::resize_file(folder_ / "tokens.bin", 2); }

  LoadedConfig token_config(const std::string& name, const Sets& more = {}) const {
    return config(name, with({"data.path=" + (folder_ / "tokens.bin"), "data.tokenizer=null", "data.format=nanogpt", "model.vocab_size=8",
                              "training.steps=4", "eval.interval=0"},
                             more));
  }

  static std::unique_ptr<Backend> device(const std::string& name) {
    if (name == "closed") return std::make_unique<test::ClosedDevice>();
    if (name == "async") return std::make_unique<test::AsyncDevice>();
    return make_backend(name);
  }
  // Runs on a device of that name.
  TrainedRun run_device(const std::string& on, const std::string& name, const Sets& sets = {},
                        std::function<Request()> request = {}) const {
    return run(token_config(name, sets), std::move(request), {}, [&] { return device(on); });
  }

  // Calls `seen` with the steps, before the file is cut at one of them.
  TrainSummary run_seen(const std::string& on, const Sets& sets, const std::function<void(const StepEvent&)>& seen, int64_t cut = -1,
                        const std::function<Request()>& request = {}) const {
    TrainEvents events;
    events.step = [&](const StepEvent& event) {
      seen(event);
      if (event.step == cut) cut_tokens();
    };
    events.request = request;
    return train(token_config("seen", sets), {"test"}, events, {}, [&] { return device(on); });
  }
};

TEST_F(StepBatchesTest, TheNextBatchIsUploadedWhenAllOfAStepIsAskedForAndBeforeTheHostWaits) {
  std::string log;
  std::vector<std::string> steps;
  TrainEvents events;
  events.step = [&](const StepEvent&) {
    log.erase(std::unique(log.begin(), log.end(), [](char a, char b) { return a == 'U' && b == 'U'; }), log.end());
    steps.push_back(std::exchange(log, ""));
  };
  train(token_config("logged"), {"test"}, events, {}, [&] { return std::make_unique<LoggedDevice>(log); });
  ASSERT_EQ(steps.size(), 4U);
  // Tokens, positions and targets of two micro batches; what AdamW needs of a step; and the outcome, which is asked for before the updates.
  EXPECT_THAT(steps[0], ::testing::EndsWith("uaUuuuuuud"));
  EXPECT_EQ(steps[1], "uaUuuuuuud");
  EXPECT_EQ(steps[2], "uaUuuuuuud");
  EXPECT_EQ(steps[3], "uaUd") << "no step comes after the last";
}

TEST_F(StepBatchesTest, LossesAreThoseOfADeviceThatReadsNothingAhead) {
  const Sets more{"training.steps=17", "eval.interval=7", "eval.iters=2", "checkpoint.interval=10"};  // 1.2 epochs
  const TrainedRun cpu = run_device("cpu", "cpu", more);
  ASSERT_EQ(cpu.losses.size(), 17U);
  expect_same_course(cpu, run_device("async", "async", more));
  EXPECT_EQ(state_of("async", 17), state_of("cpu", 17));
}

TEST_F(StepBatchesTest, AStopAndAResumeLoseAndRepeatNoSample) {
  const Sets nine{"training.steps=9"};
  const TrainedRun whole = run_device("async", "whole", nine);
  int64_t asked = 0;
  const auto stop = [&asked] { return ++asked > 4 ? Request::save_and_stop : Request::none; };  // behind step 4, with the next batch there
  const TrainedRun first = run_device("async", "parts", nine, stop);
  EXPECT_EQ(first.summary.exit, ExitCode::stopped);
  ASSERT_EQ(first.losses.size(), 4U);
  std::vector<double> losses = first.losses;
  for (const double loss : run_device("async", "parts", with(nine, {"checkpoint.resume=auto"})).losses) losses.push_back(loss);
  EXPECT_EQ(losses, whole.losses);
  EXPECT_EQ(state_of("parts", 9), state_of("whole", 9));
}

// A CPU reads nothing ahead. On a device the batch of step 3 is there when step 2 is reported, and that of step 4 is not.
TEST_F(StepBatchesTest, ACutFileEndsTheRunWhenTheStepThatNeedsItBegins) {
  const Sets more{"training.steps=10", "checkpoint.interval=1", "checkpoint.keep_every=1"};
  const TrainedRun whole = run_device("cpu", "whole", {"training.steps=10"});
  for (const auto& [on, expected] : {std::pair("closed", 3U), std::pair("cpu", 2U)}) {
    std::filesystem::remove_all(run_folder("seen"));
    write_tokens();
    std::vector<double> losses;
    const Error error = test::error_of([&, on = on] {
      run_seen(
          on, more, [&](const StepEvent& event) { losses.push_back(event.loss.value()); }, 2);
    });
    EXPECT_EQ(error.code(), ExitCode::data);
    EXPECT_THAT(error.what(), HasSubstr("tokens.bin"));
    ASSERT_EQ(losses.size(), expected) << on;
    EXPECT_EQ(losses.back(), whole.losses[expected - 1]);
    EXPECT_TRUE(std::filesystem::exists(checkpoint("seen", expected))) << "what the step has done is saved first";
  }
}

TEST_F(StepBatchesTest, AStopWinsOverAnErrorOfTheNextBatch) {
  std::vector<int64_t> steps;
  const auto request = [&] { return steps.size() >= 2 ? Request::save_and_stop : Request::none; };
  const TrainSummary summary = run_seen(
      "closed", {}, [&](const StepEvent& event) { steps.push_back(event.step); }, 1, request);
  EXPECT_EQ(summary.exit, ExitCode::stopped);
  EXPECT_THAT(steps, ElementsAre(1, 2));
}

TEST_F(StepBatchesTest, PeakMemoryOfADeviceIsReported) {
  test::ClosedDevice* made = nullptr;
  std::vector<double> reported, held;
  TrainEvents events;
  events.step = [&](const StepEvent& event) {
    reported.push_back(event.gpu_memory_gib.value_or(-1));
    held.push_back(static_cast<double>(made->allocator_stats().peak_in_use) * 0x1p-30);
    EXPECT_FALSE(event.mfu) << "no data sheet knows it";
  };
  train(token_config("closed"), {"test"}, events, {}, [&] {
    auto own = std::make_unique<test::ClosedDevice>();
    made = own.get();
    return own;
  });
  EXPECT_EQ(reported, held);
  EXPECT_EQ(reported.size(), 4U);
  for (const StepEvent& event : run_device("cpu", "cpu").steps) EXPECT_FALSE(event.gpu_memory_gib);
}

TEST_F(StepBatchesTest, OfOtherGemmsThanThoseOfBf16AreSaidToBe) {
  const auto of_other_gemms = [&](const std::string& name, const std::string& dtype) {
    return run_device("cpu", name + dtype,
                      {"model.hidden_size=64", "model.intermediate_size=64", "training.steps=1", "precision.recipe=" + name,
                       "precision.dtype=" + dtype})
        .steps.at(0)
        .other_gemms;
  };
  EXPECT_FALSE(of_other_gemms("high", "bf16"));
  EXPECT_TRUE(of_other_gemms("high", "fp32"));
  EXPECT_TRUE(of_other_gemms("mxfp8", "bf16"));
}

// ---- batches alone

class TakenBatches : public StepBatchesTest {
 protected:
  TakenBatches() : config_(token_config("run").config), data_(open_data(config_.data, {.seq_len = 16, .vocab_size = 8, .seed = 1})) {}

  RunConfig config_;
  Data data_;
  test::ClosedDevice device_;
  Gpt model_{config_.model, device_, resolve_plan(config_), {.gradients = false}};
  StepBatches batches_{*data_.train, model_, {.sequences = 8, .micro_batch_size = 4}};
};

TEST_F(TakenBatches, OneThatWasPrefetchedIsThereOnce) {
  batches_.prefetch(8);
  const int64_t before = device_.uploads();
  const StepBatch there = batches_.take(8);
  EXPECT_EQ(device_.uploads(), before);
  EXPECT_EQ(there.rows.tokens, data_.train->batch(8, 8).tokens);
  ASSERT_EQ(there.uploaded.size(), 2U);
  const auto begin = there.rows.targets.begin();
  EXPECT_EQ(to_host<int32_t>(there.uploaded[0].targets), std::vector<int32_t>(begin, begin + 64));
  EXPECT_EQ(to_host<int32_t>(there.uploaded[1].targets), std::vector<int32_t>(begin + 64, begin + 128));
  EXPECT_THAT(batches_.take(8).uploaded, IsEmpty());
}

TEST_F(TakenBatches, AnotherOneIsReadAnew) {
  batches_.prefetch(8);
  const StepBatch other = batches_.take(0);
  EXPECT_EQ(other.rows.tokens, data_.train->batch(0, 8).tokens);
  EXPECT_THAT(other.uploaded, IsEmpty());
}

TEST_F(TakenBatches, AnErrorIsKeptForTheStepThatNeedsTheBatch) {
  cut_tokens();
  EXPECT_NO_THROW(batches_.prefetch(8));
  EXPECT_EQ(test::error_of([&] { batches_.take(8); }).code(), ExitCode::data);
}

// An id beyond the vocabulary of the model.
TEST_F(TakenBatches, IndicesAreCheckedAhead) {
  RunConfig narrow = config_;
  narrow.model.vocab_size = 3;
  Gpt model(narrow.model, device_, resolve_plan(narrow), {.gradients = false});
  StepBatches batches(*data_.train, model, {.sequences = 8, .micro_batch_size = 4});
  batches.prefetch(0);
  EXPECT_EQ(test::error_of([&] { batches.take(0); }).code(), ExitCode::data);
}

TEST_F(TakenBatches, MemoryOfAMicroBatchGoesWithItsBackwardPass) {
  Gpt model(config_.model, device_, resolve_plan(config_), {.gradients = true});
  Optimizer optimizer(model.parameters(), config_.optimizer);
  optimizer.initialize(1);
  GradientAccumulator accumulator(model.parameters(), Accumulation::running, 2);
  StepBatches batches(*data_.train, model, {.sequences = 8, .micro_batch_size = 4});
  const auto in_use = [&](StepBatch batch) {
    int64_t out = 0;
    training_step(model, optimizer, accumulator, batch.rows, 4, 1e-3,
                  {.uploaded = std::move(batch.uploaded), .meanwhile = [&] { out = device_.allocator_stats().in_use; }});
    return out;
  };
  in_use(batches.take(0));  // makes tables that stay
  const int64_t of_one_by_one = in_use(batches.take(0));
  batches.prefetch(0);
  EXPECT_EQ(in_use(batches.take(0)), of_one_by_one);
}

}  // namespace mantissa::step_batches_test
