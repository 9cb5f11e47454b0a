// Kernels on a rank whose share of tokens is empty: they write nothing but the gradients of parameters, to which no row adds.
#include "testing.h"

namespace mantissa::test::empty_share_test {

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

// An output without rows is the beginning of a tensor whose rows must stay as they are.
TEST_P(EmptyShare, IsTakenByElementwiseKernelsWhichWriteNothing) {
  const Tensor narrow = random_tensor(*device_, dtype_, {2, kChannels}, 3), wide = random_tensor(*device_, dtype_, {2, 2 * kChannels}, 4),
               stats = random_tensor(*device_, Dtype::f32, {2, kChannels}, 5);
  const std::vector<double> before[] = {values(narrow), values(wide), values(stats)};
  const Tensor out = narrow.slice(0, 0);
  device_->run(Convert{.x = rows(), .out = stats.slice(0, 0)});
  device_->run(Add{.a = rows(), .b = rows(), .out = out});
  device_->run(AddBias{.x = empty(*device_, Dtype::f32, {0, kChannels}), .bias = parameter(), .out = out});
  device_->run(SwiGluForward{.x = rows(2 * kChannels), .out = out});
  device_->run(SwiGluBackward{.x = rows(2 * kChannels), .dy = rows(), .dx = wide.slice(0, 0)});
  device_->run(GeluForward{.x = rows(), .out = out, .form = GeluForm::tanh});
  device_->run(GeluBackward{.x = rows(), .dy = rows(), .dx = out, .form = GeluForm::erf});
  EXPECT_EQ(values(narrow), before[0]);
  EXPECT_EQ(values(wide), before[1]);
  EXPECT_EQ(values(stats), before[2]);
}

TEST_P(EmptyShare, AddsNothingToGradientsOfParameters) {
  const Tensor ids = empty(*device_, Dtype::i32, {0}), x = rows(), w = parameter();
  device_->run(RmsNormForward{.x = x, .weight = w, .y = x, .rstd = stats(), .eps = 1e-5});
  device_->run(LayerNormForward{.x = x, .weight = w, .y = x, .mean = stats(), .rstd = stats(), .eps = 1e-5, .bias = w});
  device_->run(EmbeddingForward{.ids = ids, .weight = random_tensor(*device_, dtype_, {5, kChannels}, 1), .out = x});
  const auto layer_norm = [&](const Tensor& dweight, const Tensor& dbias, bool accumulate) {
    device_->run(LayerNormBackward{.x = x,
                                   .weight = w,
                                   .mean = stats(),
                                   .rstd = stats(),
                                   .dy = x,
                                   .dx = x,
                                   .dweight = dweight,
                                   .accumulate = accumulate,
                                   .dbias = dbias});
  };
  expect_no_gradient({kChannels}, [&](const Tensor& out, bool accumulate) {
    device_->run(RmsNormBackward{.x = x, .weight = w, .rstd = stats(), .dy = x, .dx = x, .dweight = out, .accumulate = accumulate});
  });
  expect_no_gradient({kChannels}, [&](const Tensor& out, bool accumulate) { layer_norm(out, gradient(), accumulate); });
  expect_no_gradient({kChannels}, [&](const Tensor& out, bool accumulate) { layer_norm(gradient(), out, accumulate); });
  expect_no_gradient({kChannels},
                     [&](const Tensor& out, bool accumulate) { device_->run(SumRows{.x = x, .out = out, .accumulate = accumulate}); });
  expect_no_gradient({5, kChannels}, [&](const Tensor& out, bool accumulate) {
    device_->run(EmbeddingBackward{.ids = ids, .dy = x, .dweight = out, .accumulate = accumulate});
  });
}

INSTANTIATE_TEST_SUITE_P(, EmptyShare,
                         ::testing::Combine(::testing::Values("cpu", "cpu_reference"), ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& c) { return std::string(std::get<0>(c.param)) + "_" + dtype_name(std::get<1>(c.param)); });

}  // namespace mantissa::test::empty_share_test
