// Kernels on a rank whose share of tokens is empty: they write nothing but the gradients of parameters, to which no row adds.
#include "testing.h"

namespace mantissa::test {
namespace {

constexpr int64_t kChannels = 48;

class EmptyShare : public ::testing::TestWithParam<std::tuple<const char*, Dtype>> {
 protected:
  EmptyShare() : device_(make_backend(std::get<0>(GetParam()))), dtype_(std::get<1>(GetParam())) {}
  Tensor rows(int64_t columns = kChannels) { return empty(*device_, dtype_, {0, columns}); }
  Tensor stats() { return empty(*device_, Dtype::f32, {0}); }
  Tensor parameter() { return random_tensor(*device_, dtype_, {kChannels}, 1); }
  Tensor gradient(Shape shape = {kChannels}) { return random_tensor(*device_, Dtype::f32, shape, 2); }

  // run(out, accumulate): adds nothing, or overwrites with zeros.
  template <class Run>
  void expect_no_gradient(Shape shape, const Run& run) {
    const Tensor out = gradient(shape);
    const std::vector<double> before = values(out);
    run(out, true);
    EXPECT_EQ(values(out), before);
    run(out, false);
    EXPECT_EQ(values(out), std::vector<double>(before.size()));
  }

  std::unique_ptr<Backend> device_;
  Dtype dtype_;
};

TEST_P(EmptyShare, IsTakenByElementwiseKernels) {
  device_->run(Convert{.x = rows(), .out = empty(*device_, Dtype::f32, {0, kChannels})});
  device_->run(Add{.a = rows(), .b = rows(), .out = rows()});
  device_->run(AddBias{.x = empty(*device_, Dtype::f32, {0, kChannels}), .bias = parameter(), .out = rows()});
  device_->run(SwiGluForward{.x = rows(2 * kChannels), .out = rows()});
  device_->run(SwiGluBackward{.x = rows(2 * kChannels), .dy = rows(), .dx = rows(2 * kChannels)});
  device_->run(GeluForward{.x = rows(), .out = rows(), .form = GeluForm::tanh});
  device_->run(GeluBackward{.x = rows(), .dy = rows(), .dx = rows(), .form = GeluForm::erf});
}

TEST_P(EmptyShare, AddsNothingToGradientsOfNorms) {
  device_->run(RmsNormForward{.x = rows(), .weight = parameter(), .y = rows(), .rstd = stats(), .eps = 1e-5});
  device_->run(LayerNormForward{
      .x = rows(), .weight = parameter(), .y = rows(), .mean = stats(), .rstd = stats(), .eps = 1e-5, .bias = parameter()});
  expect_no_gradient({kChannels}, [&](const Tensor& out, bool accumulate) {
    device_->run(RmsNormBackward{
        .x = rows(), .weight = parameter(), .rstd = stats(), .dy = rows(), .dx = rows(), .dweight = out, .accumulate = accumulate});
  });
  for (const bool of_bias : {false, true}) {
    expect_no_gradient({kChannels}, [&](const Tensor& out, bool accumulate) {
      device_->run(LayerNormBackward{.x = rows(),
                                     .weight = parameter(),
                                     .mean = stats(),
                                     .rstd = stats(),
                                     .dy = rows(),
                                     .dx = rows(),
                                     .dweight = of_bias ? gradient() : out,
                                     .accumulate = accumulate,
                                     .dbias = of_bias ? out : gradient()});
    });
  }
}

TEST_P(EmptyShare, AddsNothingToGradientsOfBiasesAndTables) {
  const Tensor ids = empty(*device_, Dtype::i32, {0});
  expect_no_gradient({kChannels},
                     [&](const Tensor& out, bool accumulate) { device_->run(SumRows{.x = rows(), .out = out, .accumulate = accumulate}); });
  device_->run(EmbeddingForward{.ids = ids, .weight = random_tensor(*device_, dtype_, {5, kChannels}, 1), .out = rows()});
  expect_no_gradient({5, kChannels}, [&](const Tensor& out, bool accumulate) {
    device_->run(EmbeddingBackward{.ids = ids, .dy = rows(), .dweight = out, .accumulate = accumulate});
  });
}

INSTANTIATE_TEST_SUITE_P(, EmptyShare,
                         ::testing::Combine(::testing::Values("cpu", "cpu_reference"), ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& c) { return std::string(std::get<0>(c.param)) + "_" + dtype_name(std::get<1>(c.param)); });

}  // namespace
}  // namespace mantissa::test
