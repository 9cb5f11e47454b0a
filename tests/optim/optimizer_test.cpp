#include "optim/optimizer.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>

#include "files.h"
#include "optim/accumulation.h"
#include "testing.h"

namespace mantissa::optimizer_test {

// AdamW in fp64, from Loshchilov and Hutter 2019, algorithm 2, with the gradient clipped by its global norm before.
struct ReferenceAdamW {
  OptimizerConfig config;
  std::vector<std::vector<double>> weights, m, v;
  std::vector<bool> decays;
  int updates = 0;

  void step(const std::vector<std::vector<double>>& gradients, double lr) {
    double squares = 0.0;
    for (const auto& gradient : gradients) {
      for (const double g : gradient) squares += g * g;
    }
    const double scale = config.grad_clip > 0.0 ? std::min(1.0, config.grad_clip / (std::sqrt(squares) + 1e-6)) : 1.0;
    ++updates;
    for (size_t p = 0; p < weights.size(); ++p) {
      for (size_t i = 0; i < weights[p].size(); ++i) {
        const double g = gradients[p][i] * scale;
        m[p][i] = config.beta1 * m[p][i] + (1 - config.beta1) * g;
        v[p][i] = config.beta2 * v[p][i] + (1 - config.beta2) * g * g;
        const double m_hat = m[p][i] / (1 - std::pow(config.beta1, updates)), v_hat = v[p][i] / (1 - std::pow(config.beta2, updates));
        if (decays[p]) weights[p][i] -= lr * config.weight_decay * weights[p][i];
        weights[p][i] -= lr * m_hat / (std::sqrt(v_hat) + config.eps);
      }
    }
  }
};

// A matrix, a vector and a cube, with their optimizer.
struct Built {
  explicit Built(Backend& device, Dtype compute = Dtype::f32, const OptimizerConfig& config = {}) {
    set.add({.name = "matrix", .shape = {40, 7}, .init = {.constant = 0.0, .std = 0.5}, .dtype = compute});
    set.add({.name = "vector", .shape = {33}, .init = {.constant = 1.0, .std = 0.0}, .dtype = compute});
    set.add({.name = "cube", .shape = {2, 3, 5}, .init = {.constant = 0.0, .std = 0.1}, .dtype = compute});
    set.allocate(device, Dtype::f32, true);
    no_loss = {.losses = zeros(device, Dtype::f64, {1})};
    optimizer.emplace(set, config);
    optimizer->initialize(5);
  }

  std::vector<std::vector<double>> set_gradients(uint32_t what, double scale = 1.0) {
    std::vector<std::vector<double>> gradients;
    for (Parameter& parameter : set.all()) {
      test::assign(parameter.leaf.grad, test::random_values(parameter.shape.elements(), what, scale));
      gradients.push_back(test::values(parameter.leaf.grad));
      what += 1000;
    }
    return gradients;
  }
  UpdateResult update(double lr) { return optimizer->update(lr, no_loss); }

  std::vector<std::vector<double>> all(Tensor Optimizer::State::*of) const {
    std::vector<std::vector<double>> out;
    for (size_t i = 0; i < 3; ++i) out.push_back(test::values(optimizer->states()[i].*of));
    return out;
  }
  std::vector<std::vector<double>> masters() const { return all(&Optimizer::State::master); }

  void expect_values_of_masters() {
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(test::same_bits(set.all()[i].value(), converted(optimizer->states()[i].master, Dtype::bf16)));
  }

  ParameterSet set;
  std::optional<Optimizer> optimizer;
  StepLosses no_loss;
};

using OptimizerTest = test::BackendTest;

TEST_F(OptimizerTest, FollowsAdamWInFp64OverManySteps) {
  for (const double clip : {1.0, 0.0}) {  // 0: none
    const OptimizerConfig config{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_clip = clip};
    Built built(fast(), Dtype::f32, config);
    ReferenceAdamW reference{.config = config, .weights = built.masters(), .m = {}, .v = {}, .decays = {true, false, true}};
    for (const auto& weights : reference.weights) reference.m.emplace_back(weights.size()), reference.v.emplace_back(weights.size());
    for (uint32_t step = 0; step < 30; ++step) {
      const double lr = 1e-3 * (step + 1);
      const auto gradients = built.set_gradients(step, step % 2 == 0 ? 1.0 : 0.01);  // norms of about 18 and 0.18
      built.update(lr);
      reference.step(gradients, lr);
    }
    for (size_t i = 0; i < 3; ++i) {  // 30 fp32 roundings of values near 1
      EXPECT_TRUE(test::close(built.masters()[i], reference.weights[i], 3e-6)) << clip;
      EXPECT_TRUE(test::close(built.all(&Optimizer::State::first_moment)[i], reference.m[i], 3e-6)) << clip;
      EXPECT_TRUE(test::close(built.all(&Optimizer::State::second_moment)[i], reference.v[i], 3e-6)) << clip;
    }
  }
}

TEST_F(OptimizerTest, NormIsThatOfAllGradientsTogether) {
  Built built(fast());
  double squares = 0.0;
  for (const auto& gradient : built.set_gradients(1, 3.0)) {
    for (const double g : gradient) squares += g * g;
  }
  EXPECT_NEAR(built.update(0.0).gradient_norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
  for (Parameter& parameter : built.set.all())
    fast().run(Fill{.out = parameter.leaf.grad, .value = static_cast<double>(std::numeric_limits<float>::max())});
  EXPECT_TRUE(std::isfinite(built.update(0.0).gradient_norm)) << "of the largest finite gradients";
}

TEST_F(OptimizerTest, WeightsInTheComputeTypeAreRoundedFromTheMasters) {
  Built built(fast(), Dtype::bf16);
  built.expect_values_of_masters();
  const auto masters_of_five = built.masters();
  test::initialize(built.set, 5);  // without masters the same values
  built.expect_values_of_masters();
  built.set_gradients(1);
  built.update(0.01);
  built.expect_values_of_masters();
  built.optimizer->initialize(6);
  EXPECT_NE(built.masters()[0], masters_of_five[0]);
}

TEST_F(OptimizerTest, SkippedUpdateChangesNothingAndIsNotCounted) {
  Built built(fast(), Dtype::bf16);
  built.set_gradients(1);
  built.update(0.01);
  const auto before = built.masters(), first = built.all(&Optimizer::State::first_moment),
             second = built.all(&Optimizer::State::second_moment);
  test::set_value(built.set.all()[1].leaf.grad, 17, std::nan(""));
  const UpdateResult result = built.update(0.01);
  EXPECT_TRUE(std::isnan(result.gradient_norm));
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(built.masters(), before);
  EXPECT_EQ(built.all(&Optimizer::State::first_moment), first);
  EXPECT_EQ(built.all(&Optimizer::State::second_moment), second);
  EXPECT_EQ(built.optimizer->updates(), 1);
  // The value follows the master all the same, also where no update wrote it.
  fast().run(Fill{.out = built.set.all()[0].value(), .value = 7.0});
  built.update(0.01);
  built.expect_values_of_masters();
}

// Weights are checked as forward reads them: rounded to bf16, in which the largest fp32 is Inf.
TEST_F(OptimizerTest, WhatIsNotFiniteIsNamed) {
  Built gradients(fast()), weights(fast(), Dtype::bf16);
  gradients.set_gradients(1);
  EXPECT_EQ(gradients.optimizer->first_nonfinite(Optimizer::Checked::gradients).text, "");
  test::set_value(gradients.set.all()[2].leaf.grad, 29, -HUGE_VAL);
  EXPECT_FALSE(std::isfinite(gradients.update(0.0).gradient_norm));
  EXPECT_EQ(gradients.optimizer->first_nonfinite(Optimizer::Checked::gradients).text, "cube[1, 14] = -inf");
  EXPECT_EQ(weights.optimizer->first_nonfinite(Optimizer::Checked::weights).text, "");
  test::set_value(weights.optimizer->states()[2].master, 29, double{std::numeric_limits<float>::max()});
  weights.optimizer->store_masters();
  EXPECT_EQ(weights.optimizer->first_nonfinite(Optimizer::Checked::weights).text, "cube[1, 14] = inf");
}

// A frozen weight has no gradient to look at; its values are looked at.
TEST_F(OptimizerTest, WhatIsNotFiniteIsNamedBesideFrozenWeights) {
  ParameterSet set;
  set.add({.name = "frozen", .shape = {40, 7}, .init = {.constant = 1.0, .std = 0.0}, .training = {.lr_factor = 0.0}});
  set.add({.name = "trained", .shape = {33}, .init = {.constant = 1.0, .std = 0.0}});
  set.allocate(fast(), Dtype::f32, true);
  Optimizer optimizer(set, OptimizerConfig());
  optimizer.initialize(5);
  test::assign(set.all()[1].leaf.grad, test::random_values(33, 1, 1.0));
  EXPECT_EQ(optimizer.first_nonfinite(Optimizer::Checked::gradients).text, "");
  test::set_value(set.all()[1].leaf.grad, 3, HUGE_VAL);
  const Optimizer::Nonfinite gradient = optimizer.first_nonfinite(Optimizer::Checked::gradients);
  EXPECT_EQ(gradient.text, "trained[3] = inf");
  EXPECT_EQ(gradient.parameter, 1U);
  test::set_value(optimizer.states()[0].master, 15, std::nan(""));
  EXPECT_EQ(optimizer.first_nonfinite(Optimizer::Checked::weights).text, "frozen[2, 1] = nan");
}

TEST_F(OptimizerTest, AMicroBatchWithoutAGradientIsAnError) {
  for (const Accumulation how : {Accumulation::running, Accumulation::tree}) {
    Built built(fast());
    built.optimizer.reset();
    Shards shards(built.set);
    GradientAccumulator accumulator(built.set, how, 2);
    const Error error = test::error_of([&] {
      accumulator.accumulate(
          [&](int64_t) {
            built.set.all()[0].leaf.target();
            return built.no_loss.losses;
          },
          shards);
    });
    EXPECT_STREQ(error.what(), "vector received no gradient");
  }
}

TEST_F(OptimizerTest, LossesAreSummedInTheOrderOfTheGradients) {
  Built built(fast());
  built.set_gradients(1);
  const std::vector<double> losses = {1.0, 0x1p53, 1.0, -0x1p53};  // 1 + 2^53 is 2^53, and 1 - 2^53 is exact
  const Tensor all = from_host(fast(), Dtype::f64, {4}, losses.data());
  EXPECT_EQ(built.optimizer->update(0.0, {.losses = all}).loss, 0.0);
  EXPECT_EQ(built.optimizer->update(0.0, {.losses = all, .pairwise = true}).loss, 1.0);
}

// After 1000 updates no correction is left: the update is 1 - beta1 over sqrt(1 - beta2) of the first one.
TEST_F(OptimizerTest, ResumedCounterContinuesTheBiasCorrection) {
  const auto moved_after = [&](int64_t updates) {
    Built built(fast());
    built.optimizer->set_updates(updates);
    built.set_gradients(1);
    const double before = test::values(built.set.all()[1].value())[0];
    built.update(1e-3);
    return test::values(built.set.all()[1].value())[0] - before;
  };
  EXPECT_NEAR(moved_after(1000) / moved_after(0), 0.1 / std::sqrt(0.05), 1e-3);
}

}  // namespace mantissa::optimizer_test
