// Everything that a run does, on devices whose memory the host cannot touch, and that work later than they are asked to: with the bits of
// the CPU.
#include <gmock/gmock.h>

#include "async_device.h"
#include "config/training_options.h"
#include "mantissa/backend/functions.h"
#include "metrics/precision_statistics.h"
#include "thread_links.h"
#include "thread_ranks.h"
#include "train/evaluate.h"
#include "train/generate.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::devices_test {

using test::AsyncDevice;
using test::ClosedDevice;
using test::TrainingTest;
using Sets = std::vector<std::string>;

// Parts of a run, on a device of the test's choice.
struct Trainee {
  const RunConfig& config;
  const Data& data;
  PrecisionPlan plan = resolve_plan(config);
  Gpt model;
  Optimizer optimizer;
  GradientAccumulator accumulator;

  Trainee(Backend& device, const RunConfig& of, const Data& on, const Mesh& mesh = {})
      : config(of),
        data(on),
        model(of.model, device, plan, training_options(of, mesh)),
        optimizer(model.parameters(), of.optimizer, mesh),
        accumulator(model.parameters(), of.training.accumulation, *of.training.grad_accum) {}

  TrainedParts parts() { return {config, plan, data, model.parameters(), optimizer}; }
  StepResult step(const Batch& batch) {
    return training_step(model, optimizer, accumulator, batch, config.training.micro_batch_size, 1e-2);
  }
};

// All results of a run.
struct Results {
  std::vector<double> numbers;  // losses and norms of steps, an evaluation, statistics of quantized operands
  std::vector<int32_t> sample;
  std::string saved;  // the shard and the manifest's plan
  std::string bad;    // reason why a step with a NaN in a weight was skipped

  bool operator==(const Results& other) const = default;
};

class DevicesTest : public TrainingTest {
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

class WholeRun : public DevicesTest, public ::testing::WithParamInterface<Sets> {};

TEST_P(WholeRun, OnAnyDeviceHasTheBitsOfTheCpu) {
  Sets sets = {"model.hidden_size=64", "model.intermediate_size=96", "training.accumulation=tree", "model.vocab_size=8",
               "precision.dtype=bf16"};
  sets.insert(sets.end(), GetParam().begin(), GetParam().end());
  const RunConfig config = this->config("run", sets).config;
  Data data = open_data(config.data, {.seq_len = 16, .vocab_size = 8, .seed = 1});
  const std::unique_ptr<Backend> cpu = make_backend("cpu");
  ClosedDevice closed;
  AsyncDevice async;
  const Results expected = results(*cpu, *cpu, "cpu", config, data);
  EXPECT_EQ(results(closed, closed, "closed", config, data), expected);
  EXPECT_EQ(results(*cpu, async, "there", config, data), expected);
  EXPECT_EQ(results(async, *cpu, "back", config, data), expected);
  const bool quantized = config.precision.recipe != "high";
  EXPECT_THAT(expected.bad, ::testing::StartsWith(quantized ? "layers.0.attn.qkv.weight[0, 7] = nan" : "loss = nan"));
}

INSTANTIATE_TEST_SUITE_P(Precision, WholeRun,
                         ::testing::Values(Sets{"precision.dtype=fp32"}, Sets{"precision.recipe=mxfp8"},
                                           Sets{"precision.recipe=mxfp4_qat_mxfp8_act", "training.recompute=full"},
                                           Sets{"precision.recipe=mxfp8", "precision.fp8_param_gather=true"}),
                         [](const auto& c) { return std::to_string(c.index); });

// Requests of a step to the device after the first, which makes the table of the rotations. waits: of the host, for both lanes.
struct Asked {
  int64_t waits, uploads;
  bool operator==(const Asked&) const = default;
};

class StepOnDevice : public DevicesTest {
 protected:
  Asked asked(const Sets& sets, int64_t layers, bool measured = false) {
    Sets all = {"model.vocab_size=8", "model.hidden_size=64", "model.intermediate_size=96", text("model.num_layers=", layers)};
    all.insert(all.end(), sets.begin(), sets.end());
    const RunConfig config = this->config("run", all).config;
    Asked out{};
    const auto on_rank = [&](const Communicator& world) {
      Data data = open_data(config.data, {.seq_len = 16, .vocab_size = 8, .seed = 1});
      const Mesh mesh = make_mesh(world, config.parallel.ranks());
      ClosedDevice device;
      Trainee run(device, config, data, mesh);
      run.optimizer.initialize(3);
      const Batch batch = data.train->batch(0, *config.training.global_batch_size / config.parallel.data);
      run.step(batch);
      const Asked before = asked_of(device);
      const auto step = [&] { run.step(batch); };
      measured ? void(measure_precision(run.model.parameters(), run.plan, run.optimizer, 1, step)) : step();
      if (world.rank() > 0) return;
      const Asked after = asked_of(device);
      out = {after.waits - before.waits, after.uploads - before.uploads};
    };
    const int ranks = static_cast<int>(config.parallel.data * config.parallel.tensor);
    test::ThreadLinks links;  // a link through the host would wait in the communication lane
    EXPECT_THAT(test::run_ranks(ranks, on_rank, {}, links.maker()), ::testing::Each(::testing::IsEmpty()));
    return out;
  }

 private:
  static Asked asked_of(const ClosedDevice& device) {
    return {device.waits(Lane::compute) + device.waits(Lane::communication), device.uploads()};
  }
};

const Sets kExperts{"model.moe.num_experts=4", "model.moe.num_experts_per_tok=2", "model.moe.intermediate_size=64",
                    "precision.recipe=mxfp8", "precision.dtype=bf16"};
const Sets kBiased{"model.moe.score=sigmoid", "model.moe.bias_update_rate=0.01", "model.moe.capacity_factor=1.1"};

Sets operator+(Sets a, const Sets& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST_F(StepOnDevice, OfOneRankWaitsOnce) {
  for (const int64_t layers : {1, 3}) {
    SCOPED_TRACE(text(layers, " layers"));
    const int64_t batches = 2 * 3;  // tokens, positions and targets of two micro batches; and what changes each step
    EXPECT_EQ(asked({}, layers), (Asked{1, 1 + batches}));
    EXPECT_EQ(asked(kExperts, layers), (Asked{1, 1 + batches}));
    EXPECT_EQ(asked(kExperts + kBiased, layers), (Asked{1, 1 + batches + layers})) << "and how biases change";
    EXPECT_EQ(asked(kExperts, layers, true).waits, 2);
    EXPECT_EQ(asked(kExperts + kBiased, layers, true).waits, 2);
  }
}

TEST_F(StepOnDevice, OfSeveralRanksWaitsTwice) {
  for (const int64_t layers : {1, 3}) {
    SCOPED_TRACE(text(layers, " layers"));
    EXPECT_EQ(asked({"parallel.data=2"}, layers).waits, 2);
    EXPECT_EQ(asked(kExperts + kBiased + Sets{"parallel.data=2", "precision.fp8_param_gather=true"}, layers).waits, 2);
    EXPECT_EQ(asked(kExperts + Sets{"parallel.tensor=2", "parallel.sequence_parallel=true"}, layers).waits, 2);
    EXPECT_EQ(asked(kExperts + Sets{"parallel.tensor=2"}, layers, true).waits, 3);
  }
}

TEST_F(StepOnDevice, OfExpertRanksWaitsForCounts) {
  for (const int64_t layers : {1, 3}) {
    SCOPED_TRACE(text(layers, " layers"));
    const Sets ranks{"parallel.data=2", "parallel.expert=2"};
    const int64_t passes = 2;  // one for each micro batch
    EXPECT_EQ(asked(kExperts + kBiased + ranks, layers).waits, 2 + passes * layers);
    EXPECT_EQ(asked(kExperts + ranks + Sets{"training.recompute=full"}, layers).waits, 2 + 2 * passes * layers);
    EXPECT_EQ(asked(kExperts + ranks, layers, true).waits, 3 + passes * layers);
  }
}

TEST_F(DevicesTest, ASampleWaitsOncePerTokenAndOncePerPrompt) {
  const RunConfig config = this->config("run", {"model.vocab_size=8"}).config;
  const Data data = open_data(config.data, {.seq_len = 16, .vocab_size = 8, .seed = 1});
  ClosedDevice device;
  Trainee run(device, config, data);
  run.optimizer.initialize(3);
  const auto waits = [&](const std::vector<std::vector<int32_t>>& prompts) {
    const int64_t before = device.waits(Lane::compute);
    generate_batch(run.model, prompts, {.max_new_tokens = 5, .seed = 5});
    return device.waits(Lane::compute) - before;
  };
  EXPECT_EQ(waits({{1, 2, 3}}), 1 + 4);
  EXPECT_EQ(waits({{1, 2, 3}, {4, 5}, {6, 7, 0, 1}}), 3 + 4);
}

// Rows that arrive for experts are of another number each time, and of another on each CPU: up to 1.26 was seen.
TEST_F(DevicesTest, KeepsLittleMoreMemoryThanItUses) {
  const Sets sets =
      kExperts + Sets{"model.vocab_size=8", "model.hidden_size=64", "model.intermediate_size=96", "parallel.data=2", "parallel.expert=2"};
  const RunConfig config = this->config("run", sets).config;
  const auto on_rank = [&](const Communicator& world) {
    Data data = open_data(config.data, {.seq_len = 16, .vocab_size = 8, .seed = 1});
    const Mesh mesh = make_mesh(world, config.parallel.ranks());
    ClosedDevice device;
    Trainee run(device, config, data, mesh);
    run.optimizer.initialize(3);
    const int64_t share = *config.training.global_batch_size / 2;
    for (int64_t step = 0; step < 80; ++step) run.step(data.train->batch(step * 2 * share + world.rank() * share, share));
    const AllocatorStats stats = device.allocator_stats();
    EXPECT_LE(static_cast<double>(stats.reserved), 1.3 * static_cast<double>(stats.peak_in_use)) << world.rank();
  };
  EXPECT_THAT(test::run_ranks(2, on_rank), ::testing::Each(::testing::IsEmpty()));
}

}  // namespace mantissa::devices_test
