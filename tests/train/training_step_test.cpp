#include "train/training_step.h"

#include <gtest/gtest.h>

#include <limits>

#include "checkpoint/precision_setup.h"
#include "files.h"
#include "mantissa/plan/estimate.h"
#include "testing.h"

namespace mantissa::training_step_test {

struct StepOptions {
  Accumulation accumulation = Accumulation::running;
  int64_t micro_batches = 1;
  Dtype compute = Dtype::f32;
  Recompute recompute = Recompute::none;
  Recipe qkv{};  // recipe of layers.1.attn.qkv; without a name: high precision
};

constexpr int64_t kSequences = 8, kLength = 16, kVocabulary = 11;

ModelConfig model_of(int64_t hidden, int64_t layers, int64_t intermediate, int64_t length) {
  ModelConfig model;
  model.vocab_size = kVocabulary;
  model.hidden_size = hidden;
  model.num_layers = layers;
  model.num_attention_heads = 2;
  model.intermediate_size = intermediate;
  model.max_position_embeddings = length;
  return model;
}

Batch empty_batch(int64_t sequences, int64_t length) {
  Batch batch;
  batch.sequences = sequences;
  batch.length = length;
  return batch;
}

// The first two sequences are one document each; in the others documents end anywhere.
Batch random_batch(uint32_t what) {
  Batch batch = empty_batch(kSequences, kLength);
  int64_t start = 0;
  for (int64_t i = 0; i < kSequences * kLength; ++i) {
    const auto draw = random_words({.seed = 7}, what, static_cast<uint64_t>(i));
    if (i % kLength == 0) start = 0;
    if (i >= 2 * kLength && draw[3] % 5 == 0) start = i % kLength;
    batch.tokens.push_back(static_cast<int32_t>(draw[0] % kVocabulary));
    batch.targets.push_back(draw[1] % 5 == 0 ? kNoTarget : static_cast<int32_t>(draw[2] % kVocabulary));
    batch.positions.push_back(static_cast<int32_t>(i % kLength - start));
    batch.segment_starts.push_back(static_cast<int32_t>(start));
    batch.target_count += batch.targets.back() == kNoTarget ? 0 : 1;
  }
  return batch;
}

const ModelConfig kModel = model_of(32, 2, 48, kLength);

PrecisionPlan plan_of(const StepOptions& options) {
  std::vector<ModulePrecision> modules = test::high_plan(kModel, options.compute).modules();
  for (ModulePrecision& module : modules) {
    if (module.module.path == "layers.1.attn.qkv" && !options.qkv.name.empty()) module.recipe = options.qkv;
  }
  return PrecisionPlan(options.compute, modules);
}

// A model with its optimizer.
struct Trainee {
  Backend& device;
  Gpt model;
  Optimizer optimizer;
  GradientAccumulator accumulator;
  int64_t micro_batch_size;

  Trainee(Backend& backend, const StepOptions& options)
      : device(backend),
        model(kModel, backend, plan_of(options), {.recompute = options.recompute}),
        optimizer(model.parameters(), {}),
        accumulator(model.parameters(), options.accumulation, options.micro_batches),
        micro_batch_size(kSequences / options.micro_batches) {
    optimizer.initialize(1);
  }

  StepResult step(const Batch& batch) { return training_step(model, optimizer, accumulator, batch, micro_batch_size, 1e-3); }

  std::vector<double> gradients() { return test::values(model.parameters().gradients()); }
  std::vector<std::vector<double>> masters() {
    std::vector<std::vector<double>> out;
    for (size_t i = 0; i < model.parameters().all().size(); ++i) out.push_back(test::values(optimizer.states()[i].master));
    return out;
  }
};

using TrainingStepTest = test::BackendTest;

TEST_F(TrainingStepTest, MicroBatchesOfUnequalTargetsGiveTheGradientOfTheWholeBatch) {
  Trainee whole(fast(), {.micro_batches = 1});
  const StepResult expected = whole.step(random_batch(1));
  for (const Accumulation how : {Accumulation::running, Accumulation::tree}) {
    Trainee parts(fast(), {.accumulation = how, .micro_batches = 4});
    const StepResult result = parts.step(random_batch(1));
    EXPECT_NEAR(result.loss, expected.loss, 1e-6 * expected.loss);
    EXPECT_NEAR(result.gradient_norm, expected.gradient_norm, 1e-5 * expected.gradient_norm);
    EXPECT_TRUE(test::close(parts.gradients(), whole.gradients(), 1e-4));  // other order of fp32 sums
  }
}

TEST_F(TrainingStepTest, TheTreeNeedsAPowerOfTwoAndABufferForEachLevel) {
  const Error error = test::error_of([&] { Trainee(fast(), {.accumulation = Accumulation::tree, .micro_batches = 3}); });
  EXPECT_EQ(error.code(), ExitCode::usage);
  EXPECT_NE(std::string(error.what()).find("training.accumulation"), std::string::npos);
  EXPECT_EQ(GradientAccumulator::buffers(Accumulation::running, 8), 1);
  EXPECT_EQ(GradientAccumulator::buffers(Accumulation::tree, 1), 1);
  EXPECT_EQ(GradientAccumulator::buffers(Accumulation::tree, 8), 4);
}

TEST_F(TrainingStepTest, RecomputingChangesNoBit) {
  for (const Dtype compute : {Dtype::f32, Dtype::bf16}) {
    Trainee none(fast(), {.micro_batches = 2, .compute = compute});
    Trainee selective(fast(), {.micro_batches = 2, .compute = compute, .recompute = Recompute::selective});
    Trainee full(fast(), {.micro_batches = 2, .compute = compute, .recompute = Recompute::full});
    for (uint32_t step = 0; step < 3; ++step) {
      const StepResult expected = none.step(random_batch(step));
      for (Trainee* other : {&selective, &full}) {
        const StepResult result = other->step(random_batch(step));
        EXPECT_EQ(result.loss, expected.loss);
        EXPECT_EQ(result.gradient_norm, expected.gradient_norm);
      }
    }
    EXPECT_EQ(selective.masters(), none.masters());
    EXPECT_EQ(full.masters(), none.masters());
  }
}

TEST_F(TrainingStepTest, PoisonedParameterSkipsTheStepAndTheNextOneIsAsIfItHadNotBeen) {
  for (const Accumulation how : {Accumulation::running, Accumulation::tree}) {
    Trainee poisoned(fast(), {.accumulation = how, .micro_batches = 4}), clean(fast(), {.accumulation = how, .micro_batches = 4});
    poisoned.step(random_batch(1));
    clean.step(random_batch(1));
    const Tensor victim = poisoned.model.parameters().all()[2].value();
    const double before = test::values(victim)[5];
    test::set_value(victim, 5, std::nan(""));
    const StepResult result = poisoned.step(random_batch(2));
    EXPECT_NE(result.bad.find("loss = "), std::string::npos) << result.bad;
    EXPECT_EQ(poisoned.optimizer.updates(), 1);
    test::set_value(victim, 5, before);
    EXPECT_EQ(poisoned.masters(), clean.masters());
    EXPECT_EQ(poisoned.step(random_batch(3)).gradient_norm, clean.step(random_batch(3)).gradient_norm);
    EXPECT_EQ(poisoned.masters(), clean.masters());
  }
}

// Final norm and projection undo each other's scale in the logits, not in the gradient of the norm: 6e38.
TEST_F(TrainingStepTest, InfiniteGradientNormSkipsTheStepAlthoughTheLossIsFinite) {
  Trainee trainee(fast(), {.micro_batches = 4});
  for (Parameter& parameter : trainee.model.parameters().all()) {
    const bool inner = parameter.name.starts_with("layers.");
    fast().run(Fill{.out = parameter.value(), .value = parameter.name == "final_norm.weight" ? 1e-36 : inner ? 0.0 : 1.0});
  }
  const Tensor output = trainee.model.parameters().find("output.weight")->value();
  fast().run(Fill{.out = output, .value = 3e38});
  fast().run(Fill{.out = output.slice(0, 1), .value = -3e38});
  trainee.optimizer.store_masters();
  Batch batch = random_batch(1);
  for (int32_t& target : batch.targets) target = std::min(target, 0);
  const auto before = trainee.masters();
  const StepResult result = trainee.step(batch);
  EXPECT_TRUE(std::isfinite(result.loss));
  EXPECT_TRUE(std::isinf(result.gradient_norm)) << result.gradient_norm;
  EXPECT_EQ(result.bad, "final_norm.weight[0] = inf");
  EXPECT_EQ(trainee.optimizer.updates(), 0);
  EXPECT_EQ(trainee.masters(), before);
}

// Flashinfer's rule makes a number of a NaN, and rounding to bf16 makes Inf of the largest fp32.
TEST_F(TrainingStepTest, BadWeightThatIsFakeQuantizedSkipsTheStepByItsNameAndElement) {
  const Recipe qat{.name = "qat", .compute = Dtype::f32, .weight_fake_quant = {Format::e2m1, 1, 32, ScaleRule::flashinfer}};
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
    Trainee trainee(fast(), {.qkv = qat});
    for (Parameter& parameter : trainee.model.parameters().all()) {
      if (parameter.name == "layers.1.attn.qkv.weight") test::set_value(parameter.value(), 37, double{bad});
    }
    trainee.optimizer.store_masters();
    const std::string reason = trainee.step(random_batch(1)).bad;
    EXPECT_EQ(reason.find("layers.1.attn.qkv.weight[1, 5] = "), 0U) << reason;
    EXPECT_EQ(trainee.optimizer.updates(), 0);
  }
}

TEST_F(TrainingStepTest, BatchWithoutATargetHasNoLossAndNoGradient) {
  Trainee trainee(fast(), {});
  Batch batch = random_batch(1);
  std::fill(batch.targets.begin(), batch.targets.end(), kNoTarget);
  batch.target_count = 0;
  const StepResult result = trainee.step(batch);
  EXPECT_EQ(result.loss, 0.0);
  EXPECT_EQ(result.targets, 0);
  EXPECT_EQ(result.gradient_norm, 0.0);
  EXPECT_EQ(result.bad, "");
  EXPECT_EQ(trainee.step(random_batch(1)).targets, random_batch(1).target_count);
}

TEST_F(TrainingStepTest, NothingIsAllocatedAfterTheFirstSteps) {
  for (const Dtype compute : {Dtype::f32, Dtype::bf16}) {
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      const std::unique_ptr<Backend> device = make_backend("cpu");
      Trainee trainee(*device, {.accumulation = Accumulation::tree, .micro_batches = 4, .compute = compute, .recompute = recompute});
      for (uint32_t step = 0; step < 3; ++step) trainee.step(random_batch(step));
      const AllocatorStats warm = device->allocator_stats();
      for (uint32_t step = 3; step < 8; ++step) trainee.step(random_batch(step));
      const AllocatorStats after = device->allocator_stats();
      EXPECT_EQ(after.system_calls, warm.system_calls);
      EXPECT_EQ(after.peak_in_use, warm.peak_in_use);
      EXPECT_EQ(after.in_use, warm.in_use);
    }
  }
}

// ---- the estimate of a run against what its first step takes

struct Measured {
  int64_t predicted, peak;
  int64_t between;  // part of it that is there between steps
};

Measured measure(const ModelConfig& model, const StepOptions& options, const std::string& recipe = "high", int64_t vocab = 300) {
  RunConfig config;
  config.model = model;
  config.model.vocab_size = vocab;
  config.precision.dtype = options.compute;
  config.precision.recipe = recipe;
  config.training.micro_batch_size = 4;
  config.training.seq_len = model.max_position_embeddings;
  config.training.grad_accum = options.micro_batches;
  config.training.accumulation = options.accumulation;
  config.training.recompute = options.recompute;
  const std::unique_ptr<Backend> device = make_backend("cpu");
  Gpt gpt(config.model, *device, resolve_plan(config), {.recompute = options.recompute, .gradients = true});
  Optimizer optimizer(gpt.parameters(), {});
  optimizer.initialize(1);
  GradientAccumulator accumulator(gpt.parameters(), options.accumulation, options.micro_batches);
  const int64_t sequences = 4 * options.micro_batches, length = model.max_position_embeddings, n = sequences * length;
  Batch batch = empty_batch(sequences, length);
  batch.tokens.assign(static_cast<size_t>(n), 1);
  batch.targets = batch.tokens;
  for (int64_t i = 0; i < n; ++i) batch.positions.push_back(static_cast<int32_t>(i % length));
  batch.segment_starts.assign(static_cast<size_t>(n), 0);
  batch.target_count = n;
  training_step(gpt, optimizer, accumulator, batch, 4, 1e-3);
  const MemoryEstimate memory = estimate_memory(config, resolve_plan(config));
  return {.predicted = memory.tensors(),
          .peak = device->allocator_stats().peak_in_use,
          .between = memory.masters + memory.values + memory.gradients + memory.optimizer};
}

double ratio(const Measured& measured) { return static_cast<double>(measured.predicted) / static_cast<double>(measured.peak); }

// The allocator rounds up; kernels keep small scratch.
TEST(Estimate, PredictsThePeakOfAStep) {
  const ModelConfig qwen = model_of(64, 4, 160, 128), odd = model_of(72, 4, 150, 128);
  ModelConfig gpt2 = qwen, experts = qwen;
  gpt2.norm = Norm::layer, gpt2.norm_bias = true, gpt2.activation = Activation::gelu_tanh, gpt2.position = Position::learned;
  gpt2.qk_norm = false, gpt2.attention_bias = AttentionBias::all, gpt2.mlp_bias = true, gpt2.tie_word_embeddings = true;
  experts.moe = MoeConfig{.num_experts = 24, .num_experts_per_tok = 3, .intermediate_size = 64, .shared_intermediate_size = 32};
  experts.moe->dense_layers = {1};
  struct Case {
    const ModelConfig& model;
    std::vector<const char*> recipes;
    double least, most, most_of_full;
  };
  const Case cases[] = {
      {qwen, {"high"}, 0.8, 1.25, 1.25},
      {gpt2, {"high"}, 0.8, 1.25, 1.25},
      {experts, {"high"}, 0.8, 1.25, 1.25},
      {qwen, {"mxfp8", "mxfp8_te", "mxfp8_weights", "mxfp4_qat", "mxfp4_qat_mxfp8_act", "mxfp4_qat_mxfp4_act", "nvfp4_qat", "nvfp4_qat_nvfp4_act"}, 0.95, 1.1, 1.2},
      {odd, {"mxfp8", "mxfp4_qat_mxfp8_act", "fp8_block"}, 0.95, 1.1, 1.2}};
  for (const Case& c : cases) {
    for (const char* const recipe : c.recipes) {
      for (const Dtype compute : {Dtype::f32, Dtype::bf16}) {
        for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
          const double found = ratio(measure(c.model, {.micro_batches = 1, .compute = compute, .recompute = recompute}, recipe));
          EXPECT_TRUE(found > c.least && found < (recompute == Recompute::full ? c.most_of_full : c.most))
              << found << ' ' << recipe << ' ' << choice_name(c.model.norm) << ' ' << dtype_name(compute) << ' ' << choice_name(recompute);
        }
      }
    }
  }
}

TEST(Estimate, PredictsThePeakWhereLogitsAreMost) {
  const ModelConfig model = model_of(64, 1, 160, 128);
  ModelConfig fp32 = model;
  fp32.logits_dtype = LogitsDtype::fp32;
  for (const Dtype compute : {Dtype::f32, Dtype::bf16})
    EXPECT_NEAR(ratio(measure(model, {.micro_batches = 1, .compute = compute}, "high", 8000)), 1.0, 0.08) << dtype_name(compute);
  EXPECT_NEAR(ratio(measure(fp32, {.micro_batches = 1, .compute = Dtype::bf16}, "high", 8000)), 1.0, 0.08) << "and their gradient in bf16";
}

// Tokens are few: a step adds mostly the largest weight, in bf16.
TEST(Estimate, CountsTheWeightThatAGemmDequantizes) {
  for (const char* const recipe : {"mxfp8", "mxfp4_qat"}) {
    const Measured all = measure(model_of(512, 1, 2048, 8), {.micro_batches = 1, .compute = Dtype::bf16}, recipe);
    EXPECT_NEAR(ratio({.predicted = all.predicted - all.between, .peak = all.peak - all.between, .between = 0}), 1.0, 0.2) << recipe;
  }
}

TEST(Estimate, PredictsThePeakOfExpertsWithQuantizedOperands) {
  ModelConfig model = model_of(64, 1, 160, 128);
  model.moe = MoeConfig{.num_experts = 8, .num_experts_per_tok = 4, .intermediate_size = 64};
  model.moe->force_balance = true;
  EXPECT_NEAR(ratio(measure(model, {.micro_batches = 1, .compute = Dtype::f32}, "mxfp8")), 1.0, 0.05);
}

// Both models have the same weights, and one has more rows of them: only activations are added.
TEST(Estimate, GrowsWithTheExpertsOfAToken) {
  ModelConfig one = model_of(64, 4, 160, 128);
  one.moe = MoeConfig{.num_experts = 6, .num_experts_per_tok = 1, .intermediate_size = 96};
  ModelConfig five = one;
  five.moe->num_experts_per_tok = 5;
  for (const char* const recipe : {"high", "mxfp8"}) {
    for (const Recompute recompute : {Recompute::none, Recompute::selective}) {
      const StepOptions options{.micro_batches = 1, .compute = Dtype::bf16, .recompute = recompute};
      const Measured few = measure(one, options, recipe), many = measure(five, options, recipe);
      const double found = ratio({.predicted = many.predicted - few.predicted, .peak = many.peak - few.peak, .between = 0});
      EXPECT_TRUE(found > 0.8 && found < 1.25) << found << ' ' << recipe << ' ' << choice_name(recompute);
    }
  }
}

TEST(Estimate, CountsTheBuffersOfTheTree) {
  const ModelConfig model = model_of(64, 2, 128, 8);
  const Measured running = measure(model, {.micro_batches = 4});
  const Measured tree = measure(model, {.accumulation = Accumulation::tree, .micro_batches = 4});
  EXPECT_NEAR(static_cast<double>(tree.predicted - running.predicted), static_cast<double>(tree.peak - running.peak),
              0.02 * static_cast<double>(tree.peak));
}

}  // namespace mantissa::training_step_test
