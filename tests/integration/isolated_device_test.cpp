// Everything that a run does, on a device whose memory the host cannot touch: with the bits of the CPU.
#include "isolated_device.h"

#include <gmock/gmock.h>

#include "mantissa/backend/functions.h"
#include "mantissa/metrics/precision_statistics.h"
#include "mantissa/train/evaluate.h"
#include "mantissa/train/generate.h"
#include "mantissa/train/training_step.h"
#include "training.h"

namespace mantissa::isolated_device_test {

using test::IsolatedDevice;
using test::TrainingTest;

// What a run has, on a device of the test's choice.
struct Trainee {
  const RunConfig& config;
  const Data& data;
  PrecisionPlan plan = resolve_plan(config);
  Gpt model;
  Optimizer optimizer;
  GradientAccumulator accumulator;

  Trainee(Backend& device, const RunConfig& of, const Data& on)
      : config(of),
        data(on),
        model(of.model, device, plan, {.recompute = of.training.recompute}),
        optimizer(model.parameters(), of.optimizer),
        accumulator(model.parameters(), of.training.accumulation, *of.training.grad_accum) {}

  TrainedParts parts() { return {config, plan, data, model.parameters(), optimizer}; }
  StepResult step(const Batch& batch) {
    return training_step(model, optimizer, accumulator, batch, config.training.micro_batch_size, 1e-2);
  }
};

// All that comes out of it.
struct Results {
  std::vector<double> numbers;  // losses and norms of steps, an evaluation, statistics of what was quantized
  std::vector<int32_t> sample;
  std::string saved;  // the shard and the manifest's plan
  std::string bad;    // what a step with a NaN in a weight was skipped for

  bool operator==(const Results& other) const = default;
};

class IsolatedDeviceTest : public TrainingTest {
 protected:
  // Three steps, an evaluation, a sample, a save; then another device goes on from the checkpoint and ends with a bad weight.
  Results results(Backend& first, Backend& second, const std::string& name, const RunConfig& config, Data& data) {
    Results out;
    const Batch batch = data.train->batch(0, *config.training.global_batch_size);
    Trainee run(first, config, data);
    run.optimizer.initialize(3);
    const auto reports = measure_precision(run.model.parameters(), run.plan, run.optimizer, 1, [&] { add(out, run.step(batch)); });
    for (const PrecisionEvent& report : reports) out.numbers.insert(out.numbers.end(), {report.sqnr_db.value_or(0), report.clipped});
    add(out, run.step(batch));
    add(out, run.step(batch));
    out.numbers.push_back(evaluate(run.model, data.valid, 3, 2).loss);
    out.sample = generate(run.model, {1, 2, 3}, {.max_new_tokens = 30, .seed = 5});
    CheckpointDirectory checkpoints(folder_.path() / name, {}, "test");
    const SavedCheckpoint saved = checkpoints.save(checkpoint_content(run.parts(), {.step = 3}));
    out.saved = test::read_file(saved.path / "shard-00000.safetensors") + CheckpointReader(saved.path).manifest().plan;
    resume(second, saved.path, config, data, batch, out);
    return out;
  }

 private:
  static void add(Results& out, const StepResult& step) {
    EXPECT_EQ(step.bad, "");
    out.numbers.insert(out.numbers.end(), {step.loss, step.gradient_norm});
  }

  static void resume(Backend& device, const std::filesystem::path& from, const RunConfig& config, const Data& data, const Batch& batch,
                     Results& out) {
    Trainee run(device, config, data);
    load_checkpoint(from, [&](CheckpointReader& reader) { restore(reader, run.parts()); });
    add(out, run.step(batch));
    const Tensor master = run.optimizer.states()[2].master;
    device.run(Fill{.out = master.view({master.elements()}).slice(7, 8), .value = std::nan("")});
    run.optimizer.store_masters();
    out.bad = run.step(batch).bad;
  }
};

using Sets = std::vector<std::string>;
class WholeRun : public IsolatedDeviceTest, public ::testing::WithParamInterface<Sets> {};

TEST_P(WholeRun, OnAnIsolatedDeviceHasTheBitsOfTheCpu) {
  Sets sets = {"model.hidden_size=64", "model.intermediate_size=96", "training.accumulation=tree", "model.vocab_size=8",
               "precision.dtype=bf16"};
  sets.insert(sets.end(), GetParam().begin(), GetParam().end());
  const RunConfig config = this->config("run", sets).config;
  Data data = open_data(config.data, {.seq_len = 16, .vocab_size = 8, .seed = 1});
  const std::unique_ptr<Backend> cpu = make_backend("cpu");
  IsolatedDevice isolated;
  const Results expected = results(*cpu, *cpu, "cpu", config, data);
  EXPECT_EQ(results(isolated, isolated, "isolated", config, data), expected);
  EXPECT_EQ(results(*cpu, isolated, "there", config, data), expected);
  EXPECT_EQ(results(isolated, *cpu, "back", config, data), expected);
  const bool quantized = config.precision.recipe != "high";
  EXPECT_THAT(expected.bad, ::testing::StartsWith(quantized ? "layers.0.attn.qkv.weight[0, 7] = nan" : "loss = nan"));
}

INSTANTIATE_TEST_SUITE_P(Precision, WholeRun,
                         ::testing::Values(Sets{"precision.dtype=fp32"}, Sets{}, Sets{"precision.recipe=mxfp8"},
                                           Sets{"precision.recipe=mxfp4_qat_mxfp8_act", "training.recompute=full"},
                                           Sets{"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}),
                         [](const auto& c) { return std::to_string(c.index); });

TEST_F(IsolatedDeviceTest, AStepReadsTheDeviceOnce) {
  const RunConfig config = this->config("run", {"model.vocab_size=8"}).config;
  Data data = open_data(config.data, {.seq_len = 16, .vocab_size = 8, .seed = 1});
  IsolatedDevice device;
  Trainee run(device, config, data);
  run.optimizer.initialize(3);
  const Batch batch = data.train->batch(0, *config.training.global_batch_size);
  run.step(batch);  // makes the table of the rotations
  const int64_t before = device.downloads(), uploads = device.uploads();
  run.step(batch);
  EXPECT_EQ(device.downloads(), before + 1);
  EXPECT_EQ(device.uploads(), uploads + 1 + 2 * 3) << "what changes each step, and tokens, positions and targets of two micro batches";
}

TEST(IsolatedDevice, EndsWhoTouchesItsMemory) {
  IsolatedDevice device;
  const Tensor tensor = zeros(device, Dtype::f32, {3});
  EXPECT_EQ(to_host<float>(tensor), (std::vector<float>{0, 0, 0}));
  EXPECT_DEATH(std::fprintf(stderr, "%d", static_cast<int>(*tensor.device_bytes())), "");
}

}  // namespace mantissa::isolated_device_test
