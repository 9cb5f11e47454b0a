#include "mantissa/optim/optimizer.h"

#include <gtest/gtest.h>

#include <limits>

#include "files.h"
#include "mantissa/optim/accumulation.h"
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

class OptimizerTest : public test::BackendTest {
 protected:
  void build(Dtype compute) {
    set_.add({.name = "matrix", .shape = {40, 7}, .init = {.constant = 0.0, .std = 0.5}, .dtype = compute});
    set_.add({.name = "vector", .shape = {33}, .init = {.constant = 1.0, .std = 0.0}, .dtype = compute});
    set_.add({.name = "cube", .shape = {2, 3, 5}, .init = {.constant = 0.0, .std = 0.1}, .dtype = compute});
    set_.allocate(fast(), Dtype::f32, true);
  }

  std::vector<std::vector<double>> set_gradients(uint32_t what, double scale) {
    std::vector<std::vector<double>> gradients;
    for (Parameter& parameter : set_.all()) {
      test::assign(parameter.leaf.grad, test::random_values(parameter.shape.elements(), what, scale));
      gradients.push_back(test::values(parameter.leaf.grad));
      what += 1000;
    }
    return gradients;
  }

  static std::vector<std::vector<double>> masters(const Optimizer& optimizer) {
    std::vector<std::vector<double>> out;
    for (size_t i = 0; i < 3; ++i) out.push_back(test::values(optimizer.states()[i].master));
    return out;
  }

  StepLosses no_loss() { return {.losses = zeros(fast(), Dtype::f64, {1})}; }

  ParameterSet set_;
};

class OptimizerClipTest : public OptimizerTest, public ::testing::WithParamInterface<double> {};

// 0 stands for no clipping.
TEST_P(OptimizerClipTest, FollowsAdamWInFp64OverManySteps) {
  build(Dtype::f32);
  const OptimizerConfig config{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_clip = GetParam()};
  Optimizer optimizer(set_, config);
  optimizer.initialize(5);
  ReferenceAdamW reference{.config = config, .weights = masters(optimizer), .m = {}, .v = {}, .decays = {true, false, true}};
  for (const auto& weights : reference.weights) reference.m.emplace_back(weights.size()), reference.v.emplace_back(weights.size());
  for (uint32_t step = 0; step < 30; ++step) {
    const double lr = 1e-3 * (step + 1);
    const auto gradients = set_gradients(step, step % 2 == 0 ? 1.0 : 0.01);  // norms of about 18 and 0.18
    optimizer.update(lr, no_loss());
    reference.step(gradients, lr);
  }
  size_t i = 0;
  for (const auto& weights : masters(optimizer)) {
    // 30 fp32 roundings of values near 1.
    EXPECT_TRUE(test::close(weights, reference.weights[i], 3e-6));
    EXPECT_TRUE(test::close(test::values(optimizer.states()[i].first_moment), reference.m[i], 3e-6));
    EXPECT_TRUE(test::close(test::values(optimizer.states()[i].second_moment), reference.v[i], 3e-6));
    ++i;
  }
}

INSTANTIATE_TEST_SUITE_P(, OptimizerClipTest, ::testing::Values(1.0, 0.0));

TEST_F(OptimizerTest, NormIsThatOfAllGradientsTogether) {
  build(Dtype::f32);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  double squares = 0.0;
  for (const auto& gradient : set_gradients(1, 3.0)) {
    for (const double g : gradient) squares += g * g;
  }
  EXPECT_NEAR(optimizer.update(0.0, no_loss()).gradient_norm, std::sqrt(squares), 1e-12 * std::sqrt(squares));
}

TEST_F(OptimizerTest, InitialWeightsInTheComputeTypeAreRoundedFromTheMasters) {
  build(Dtype::bf16);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(test::same_bits(set_.all()[i].value(), converted(optimizer.states()[i].master, Dtype::bf16)));
  const auto masters_of_five = masters(optimizer);
  test::initialize(set_, 5);  // without masters the same values
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(test::same_bits(set_.all()[i].value(), converted(optimizer.states()[i].master, Dtype::bf16)));
  optimizer.initialize(6);
  EXPECT_NE(masters(optimizer)[0], masters_of_five[0]);
}

TEST_F(OptimizerTest, WeightsInTheComputeTypeFollowTheMasters) {
  build(Dtype::bf16);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  set_gradients(1, 1.0);
  optimizer.update(0.01, no_loss());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(test::same_bits(set_.all()[i].value(), converted(optimizer.states()[i].master, Dtype::bf16)));
}

TEST_F(OptimizerTest, SkippedUpdateChangesNothingAndIsNotCounted) {
  build(Dtype::bf16);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  set_gradients(1, 1.0);
  optimizer.update(0.01, no_loss());
  const auto before = masters(optimizer),
             moment = std::vector{test::values(optimizer.states()[0].first_moment), test::values(optimizer.states()[0].second_moment)};
  test::set_value(set_.all()[1].leaf.grad, 17, std::nan(""));
  const UpdateResult result = optimizer.update(0.01, no_loss());
  EXPECT_TRUE(std::isnan(result.gradient_norm));
  EXPECT_TRUE(result.skipped);
  EXPECT_EQ(masters(optimizer), before);
  EXPECT_EQ((std::vector{test::values(optimizer.states()[0].first_moment), test::values(optimizer.states()[0].second_moment)}), moment);
  EXPECT_EQ(optimizer.updates(), 1);
  // The value follows the master all the same, also where no update wrote it.
  fast().run(Fill{.out = set_.all()[0].value(), .value = 7.0});
  optimizer.update(0.01, no_loss());
  EXPECT_TRUE(test::same_bits(set_.all()[0].value(), converted(optimizer.states()[0].master, Dtype::bf16)));
}

TEST_F(OptimizerTest, NormIsNotFiniteIfOneElementIsNotAndTheElementIsNamed) {
  build(Dtype::f32);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  set_gradients(1, 1.0);
  EXPECT_EQ(optimizer.first_nonfinite_gradient().text, "");
  test::set_value(set_.all()[2].leaf.grad, 29, -HUGE_VAL);
  EXPECT_FALSE(std::isfinite(optimizer.update(0.0, no_loss()).gradient_norm));
  EXPECT_EQ(optimizer.first_nonfinite_gradient().text, "cube[1, 14] = -inf");
}

// Forward reads the rounding to bf16, in which the largest fp32 is Inf.
TEST_F(OptimizerTest, AWeightIsNamedAsForwardReadsIt) {
  build(Dtype::bf16);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  EXPECT_EQ(optimizer.first_nonfinite_weight().text, "");
  test::set_value(optimizer.states()[2].master, 29, double{std::numeric_limits<float>::max()});
  optimizer.store_masters();
  EXPECT_EQ(optimizer.first_nonfinite_weight().text, "cube[1, 14] = inf");
}

TEST_F(OptimizerTest, AMicroBatchWithoutAGradientIsAnError) {
  build(Dtype::f32);
  const Tensor loss = zeros(fast(), Dtype::f64, {1});
  Shards shards(set_);
  for (const Accumulation how : {Accumulation::running, Accumulation::tree}) {
    GradientAccumulator accumulator(set_, how, 2);
    const Error error = test::error_of([&] {
      accumulator.accumulate(
          [&](int64_t) {
            set_.all()[0].leaf.target();
            return loss;
          },
          shards);
    });
    EXPECT_STREQ(error.what(), "vector received no gradient");
  }
}

TEST_F(OptimizerTest, LossesAreSummedInTheOrderOfTheGradients) {
  build(Dtype::f32);
  Optimizer optimizer(set_, {});
  set_gradients(1, 1.0);
  const std::vector<double> losses = {1.0, 0x1p53, 1.0, -0x1p53};  // 1 + 2^53 is 2^53, and 1 - 2^53 is exact
  const Tensor all = from_host(fast(), Dtype::f64, {4}, losses.data());
  EXPECT_EQ(optimizer.update(0.0, {.losses = all}).loss, 0.0);
  EXPECT_EQ(optimizer.update(0.0, {.losses = all, .pairwise = true}).loss, 1.0);
}

TEST_F(OptimizerTest, LargestFiniteGradientsHaveAFiniteNorm) {
  build(Dtype::f32);
  Optimizer optimizer(set_, {});
  optimizer.initialize(5);
  for (Parameter& parameter : set_.all()) {
    fast().run(Fill{.out = parameter.leaf.grad, .value = static_cast<double>(std::numeric_limits<float>::max())});
  }
  EXPECT_TRUE(std::isfinite(optimizer.update(0.0, no_loss()).gradient_norm));
}

TEST_F(OptimizerTest, ResumedCounterContinuesTheBiasCorrection) {
  build(Dtype::f32);
  Optimizer first(set_, {});
  first.initialize(5);
  Optimizer second(set_, {});
  second.set_updates(1000);  // no correction left: the update is 1 - beta1 over sqrt(1 - beta2) of the first one
  const double before = test::values(set_.all()[1].value())[0];
  set_gradients(1, 1.0);
  first.update(1e-3, no_loss());
  const double after_first = test::values(set_.all()[1].value())[0];
  second.update(1e-3, no_loss());
  const double after_second = test::values(set_.all()[1].value())[0];
  EXPECT_NEAR((after_second - after_first) / (after_first - before), 0.1 / std::sqrt(0.05), 1e-3);
}

}  // namespace mantissa::optimizer_test
