// Training with expert biases (model.moe.bias_update_rate): how they move, what they change, and where they are kept.
#include <gmock/gmock.h>

#include <cstring>
#include <span>

#include "checkpoint/checkpoint_diff.h"
#include "checkpoint_shards.h"
#include "hf/load_model.h"
#include "mantissa/backend/functions.h"
#include "process.h"
#include "train/generate.h"
#include "train/training_step.h"
#include "training.h"

namespace mantissa::loss_free_balance_test {

using nlohmann::json;
using test::TrainedRun;
using ::testing::HasSubstr;
using Values = std::vector<float>;

class LossFreeBalance : public test::TrainingTest {
 protected:
  static constexpr int64_t kExperts = 5, kSteps = 9;  // an odd number, so that no bias is back at 0

  // Three layers, the second of which is dense.
  static std::vector<std::string> sets(std::vector<std::string> more) {
    std::vector<std::string> out;
    out.insert(out.end(), {"model.num_layers=3", "model.moe.num_experts=5", "model.moe.intermediate_size=32", "model.moe.dense_layers=[1]",
                           "model.moe.score=sigmoid", "model.moe.aux_loss_coef=0", "model.moe.bias_update_rate=1e-2",
                           text("training.steps=", kSteps)});
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  TrainedRun run_biased(const std::string& name, std::vector<std::string> more = {}) const { return run(name, sets(std::move(more))); }

  Values bias(const std::string& name, int64_t step, int layer) const {
    return tensor(name, step, text("buffer.layers.", layer, ".moe.expert_bias"));
  }

  // The biases that follow from the loads that were told.
  static Values followed(const TrainedRun& run, size_t layer, float rate) {
    Values bias(kExperts, 0.0F);
    for (const StepEvent& step : run.steps) {
      const std::vector<int64_t>& load = step.routing.at(layer).load;
      const double mean = static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0})) / kExperts;
      for (size_t e = 0; e < bias.size(); ++e) {
        if (step.skipped) continue;
        if (static_cast<double>(load[e]) > mean) bias[e] -= rate;
        if (static_cast<double>(load[e]) < mean) bias[e] += rate;
      }
    }
    return bias;
  }

  void expect_same(const std::string& a, const std::string& b, int64_t step) const {
    CheckpointReader one(checkpoint(a, step)), other(checkpoint(b, step));
    for (const TensorDifference& difference : diff_checkpoints(one, other))
      ADD_FAILURE() << b << ": " << difference.name << ' ' << difference.what;
  }
};

// Loads count before any assignment is dropped.
TEST_F(LossFreeBalance, MovesEachBiasAgainstTheLoadOfItsExpert) {
  for (const std::string factor : {"null", "0.5"}) {
    const TrainedRun trained = run_biased(factor, {"model.moe.capacity_factor=" + factor});
    EXPECT_EQ(trained.steps.back().routing.at(0).dropped > 0.0, factor == "0.5");
    EXPECT_EQ(bias(factor, kSteps, 0), followed(trained, 0, 1e-2F));
    EXPECT_EQ(bias(factor, kSteps, 2), followed(trained, 1, 1e-2F));
    EXPECT_NE(bias(factor, kSteps, 0), Values(kExperts, 0.0F));
  }
}

// The run has 40 steps, so that what a single batch happens to hold does not count.
TEST_F(LossFreeBalance, EvensLoads) {
  const auto worst = [&](const TrainedRun& run) {
    double out = 0.0;
    for (size_t layer = 0; layer < 2; ++layer) {
      std::vector<int64_t> load(kExperts, 0);
      for (const StepEvent& step : std::span(run.steps).last(40))
        std::ranges::transform(load, step.routing.at(layer).load, load.begin(), std::plus());
      const auto all = static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0}));
      out = std::max(out, static_cast<double>(std::ranges::max(load)) * kExperts / all);
    }
    return out;
  };
  const double with = worst(run_biased("with", {"training.steps=80"})),
               without = worst(run_biased("without", {"training.steps=80", "model.moe.bias_update_rate=0"}));
  EXPECT_LT(with, 1.1);
  EXPECT_GT(without, 1.3);
}

// The biases are so small that no choice is another: everything else is like without biases.
TEST_F(LossFreeBalance, TrainsNothingElse) {
  const TrainedRun without = run_biased("without", {"model.moe.bias_update_rate=0"}),
                   with = run_biased("with", {"model.moe.bias_update_rate=1e-30"});
  EXPECT_TRUE(test::same_elements(without.losses, with.losses));
  EXPECT_TRUE(test::same_elements(without.norms, with.norms));
  CheckpointReader a(checkpoint("without", kSteps)), b(checkpoint("with", kSteps));
  std::vector<std::string> names;
  for (const TensorDifference& difference : diff_checkpoints(a, b)) names.push_back(difference.name + ' ' + difference.what);
  EXPECT_THAT(names, ::testing::ElementsAre("buffer.layers.0.moe.expert_bias only in the second",
                                            "buffer.layers.2.moe.expert_bias only in the second"));
}

TEST_F(LossFreeBalance, IsNotMovedByWhatIsComputedAgainNorByEvaluationAndSamples) {
  run_biased("plain");
  run_biased("recomputed", {"training.recompute=full"});
  run_biased("selective", {"training.recompute=selective"});
  run_biased("evaluated", {"eval.interval=1", R"(eval.samples={"interval":3,"prompts":["ab"],"max_new_tokens":4})"});
  for (const char* other : {"recomputed", "selective", "evaluated"}) expect_same("plain", other, kSteps);
}

TEST_F(LossFreeBalance, IsNotMovedByASkippedStep) {
  RunConfig config = this->config("skipped", sets({})).config;
  config.model.vocab_size = 8;
  const auto device = make_backend("cpu");
  Gpt model(config.model, *device, resolve_plan(config), training_options(config, {}));
  Optimizer optimizer(model.parameters(), config.optimizer);
  GradientAccumulator accumulator(model.parameters(), Accumulation::running, 2);
  optimizer.initialize(1);
  const LoadedConfig data_config = this->config("data");
  Data data = open_data(data_config.config.data, {.seq_len = 16});
  const auto step = [&](int64_t number) { return training_step(model, optimizer, accumulator, data.train->batch(8 * number, 8), 4, 1e-2); };
  const auto biases = [&] { return to_host<float>(model.parameters().buffers().front().value); };
  EXPECT_FALSE(step(0).skipped);
  const Values moved = biases();
  EXPECT_NE(moved, Values(kExperts, 0.0F));
  const Tensor& norm = model.parameters().find("final_norm.weight")->value();
  const Values whole = to_host<float>(norm);
  device->run(Fill{.out = norm, .value = std::nan("")});
  EXPECT_TRUE(step(1).skipped);
  EXPECT_EQ(biases(), moved);
  device->upload(whole.data(), norm);
  EXPECT_FALSE(step(2).skipped);
  EXPECT_NE(biases(), moved);
}

// The expert that is forced shows in loads; that weights are scores without biases shows in a loss that does not change where all are
// chosen.
TEST_F(LossFreeBalance, ChangesAssignmentsAndNoWeights) {
  run_biased("run", {"training.steps=2"});
  run_biased("all", {"training.steps=2", "model.moe.num_experts_per_tok=5"});
  const std::vector<int32_t> tokens = {1, 4, 7, 0, 2, 3, 5, 6}, positions = {0, 1, 2, 3, 4, 5, 6, 7};
  const auto probe = [&](const std::string& name, float bias_of_3) {
    LoadedModel loaded = load_model(checkpoint(name, 2), make_backend("cpu"));
    Backend& device = *loaded.device;
    const Values bias = {0.0F, 0.0F, 0.0F, bias_of_3, 0.0F};
    for (Buffer& buffer : loaded.model->parameters().buffers()) device.upload(bias.data(), buffer.value);
    const auto ids = [&](const std::vector<int32_t>& of) { return from_host(device, Dtype::i32, {8}, of.data()); };
    RouterStatistics statistics(RouterFigures::counts_and_losses, 2);
    const Var loss = loaded.model->loss({.batch = 1, .tokens = ids(tokens), .positions = ids(positions), .segment_starts = {}}, ids(tokens),
                                        8, &statistics);
    auto cache = loaded.model->new_cache();
    return std::tuple(to_host<double>(statistics.figures().slice(1, 2)), to_host<double>(loss.value()),
                      to_host<float>(loaded.model->next_logits(tokens, cache)));
  };
  const auto [free_counts, free_loss, free_logits] = probe("run", 0.0F);
  const auto [counts, loss, logits] = probe("run", 100.0F);
  EXPECT_LT(free_counts[3], 8);
  EXPECT_EQ(counts[3], 8);
  EXPECT_NE(loss, free_loss);
  EXPECT_NE(logits, free_logits) << "generation is steered, too";
  EXPECT_EQ(std::get<1>(probe("all", 100.0F)), std::get<1>(probe("all", 0.0F)));
}

// ---- where they are kept

TEST_F(LossFreeBalance, GoesOnWithTheBitsOfARunThatWasNotCut) {
  const auto train = [&](const std::string& name, const std::string& set) {
    run_biased(name, {"schedule.type=constant", "precision.dtype=bf16", "checkpoint.resume=auto", set});
  };
  train("whole", "eval.interval=0");
  train("cut", "training.steps=3");
  train("cut", "eval.interval=0");
  expect_same("whole", "cut", kSteps);
  train("other", "model.moe.bias_update_rate=0.02");
  CheckpointReader a(checkpoint("whole", kSteps)), b(checkpoint("other", kSteps));
  EXPECT_THAT(diff_checkpoints(a, b), ::testing::Contains(::testing::Field(&TensorDifference::name, "buffer.layers.0.moe.expert_bias")));
}

TEST_F(LossFreeBalance, TakesBiasesFromTheCheckpointOfAnotherRun) {
  run_biased("from");
  const std::string from = "checkpoint.init_from=" + checkpoint("from", kSteps);
  run_biased("frozen", {from, "training.steps=3", "model.moe.bias_update_rate=1e-30"});
  EXPECT_EQ(bias("frozen", 3, 0), bias("from", kSteps, 0));
  EXPECT_EQ(bias("frozen", 3, 2), bias("from", kSteps, 2));
  run_biased("without", {"model.moe.bias_update_rate=0"});
  run_biased("new", {"checkpoint.init_from=" + checkpoint("without", kSteps), "training.steps=1"});
  for (const float value : bias("new", 1, 0)) EXPECT_LE(std::abs(value), 1e-2F) << "it started at 0";
  run_biased("without", {"checkpoint.resume=auto", "training.steps=10"});
  for (const float value : bias("without", 10, 2)) EXPECT_LE(std::abs(value), 1e-2F) << "on resuming, too";
}

TEST_F(LossFreeBalance, IsNotLeftOutBehindAnybodysBack) {
  run_biased("run", {"training.steps=3"});
  for (const std::string& set : {std::string("checkpoint.resume=auto"), "checkpoint.init_from=" + checkpoint("run", 3)}) {
    const Error error = test::error_of([&] {
      run_biased(set.starts_with("checkpoint.resume") ? "run" : "next", {set, "training.steps=4", "model.moe.bias_update_rate=0"});
    });
    EXPECT_EQ(error.code(), ExitCode::usage) << set;
    EXPECT_THAT(error.what(), HasSubstr("has expert biases, but model.moe.bias_update_rate is 0 here"));
  }
}

TEST_F(LossFreeBalance, IsPartOfWhatACheckpointMustHold) {
  run_biased("run", {"training.steps=3"});
  const std::string path = checkpoint("run", 3), file = path + "/manifest.json";
  const Manifest untouched = CheckpointReader(path).manifest();
  const std::string shard = path + "/shard-00000.safetensors", bytes = test::read_file(shard);
  const auto error_with = [&](const std::function<void(Manifest&)>& change, const std::function<void(std::string&)>& data = {}) {
    Manifest manifest = untouched;
    change(manifest);
    if (data) test::change_shard(path, manifest, data);
    std::string content = test::read_file(shard);
    content.replace(0, static_cast<size_t>(test::header_bytes(shard)), shard_header(shard_pieces(manifest).at(0)));
    test::write_file(shard, content);
    if (!data) test::write_file(file, format_manifest(manifest));
    const Error error = test::error_of([&] { load_model(path, make_backend("cpu")); });
    test::write_file(shard, bytes);
    test::write_file(file, format_manifest(untouched));
    return text(static_cast<int>(error.code()), ": ", error.what());
  };
  const auto named = [](auto& manifest, const std::string& name) {
    return std::ranges::find(manifest.tensors, name, &ManifestTensor::name);
  };
  const std::string name = "buffer.layers.2.moe.expert_bias";
  EXPECT_THAT(error_with([&](Manifest& manifest) { named(manifest, name)->name = "other"; }),
              HasSubstr("4: " + file + " (config): its model has layers.2.moe.expert_bias, but there is no tensor " + name));
  EXPECT_THAT(error_with([&](Manifest& manifest) {
                json config = json::parse(manifest.config);
                config["model"]["moe"]["bias_update_rate"] = 0;
                manifest.config = config.dump();
              }),
              HasSubstr("its model has 0 buffers, but there are 2"));
  const int64_t offset = named(untouched, name)->pieces.at(0).offset + 4;
  EXPECT_THAT(error_with([](Manifest&) {},
                         [&](std::string& data) {
                           const float nan = std::nanf("");
                           std::memcpy(data.data() + offset, &nan, 4);
                         }),
              HasSubstr("layers.2.moe.expert_bias[1] = nan: must be finite"));
}

// eval, verify and inspect from the command line.
TEST_F(LossFreeBalance, IsKnownToTheTools) {
  const TrainedRun trained = run_biased("run", {"training.steps=4", "eval.interval=4", "eval.iters=null"});
  const std::string path = checkpoint("run", 4);
  const auto output = [&](std::vector<std::string> words) {
    const test::ProcessResult result = test::run_mantissa(std::move(words), folder_.path());
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  EXPECT_THAT(output({"inspect", path}), HasSubstr("buffer.layers.2.moe.expert_bias"));
  EXPECT_THAT(output({"verify", path}), HasSubstr("intact"));
  EXPECT_THAT(output({"eval", path}), HasSubstr(text("loss ", std::fixed, std::setprecision(4), trained.valid_losses.back())));
}

TEST_F(LossFreeBalance, CountsAsABufferAndNotAsParameters) {
  const auto plan = [&](const std::string& rate) {
    RunConfig config = this->config("plan", sets({"model.moe.bias_update_rate=" + rate})).config;
    config.model.vocab_size = 8;
    return resolve_plan(config);
  };
  EXPECT_EQ(plan("1e-3").buffers(), 2 * kExperts);
  EXPECT_EQ(plan("0").buffers(), 0);
  EXPECT_EQ(plan("1e-3").parameters(), plan("0").parameters());
  EXPECT_EQ(plan("1e-3").hash(), plan("0").hash());
}

}  // namespace mantissa::loss_free_balance_test
