// Attention by cuDNN against the reference, on a GPU of 9.0 or over the executor as one (cudnn_calls.cpp). The last test reports what the
// library does to NaN: our kernels keep it from queries that do not see it, which nothing promises of cuDNN.
#include <cmath>
#include <cstdlib>
#include <iostream>

#include "attention_runs.h"

namespace mantissa::test::cudnn_attention_test {

// Returns what the device has, or a reason against it.
std::string reason_against(Backend& device) {
  try {
    device.choose_attention(AttentionBy::cudnn);
  } catch (const Error& error) {
    return error.what();
  }
  return obstacle_text(obstacle_of_cudnn({.length = 2}, device.attention_device()), {}, device.attention_device());
}

class CudnnAttention : public ::testing::Test {
 protected:
  CudnnAttention() {
    ::setenv("MANTISSA_SIMT_ARCHITECTURE", "90", 1);
    device_ = make_backend("cuda");
    why_not_ = reason_against(*device_);
  }
  ~CudnnAttention() override { ::unsetenv("MANTISSA_SIMT_ARCHITECTURE"); }
  void SetUp() override {
    if (!why_not_.empty()) GTEST_SKIP() << "SKIPPED: " << why_not_;
  }

  // bf16 scores of a row are rounded to 8 bits before they are multiplied, as by our kernels on tensor cores, and results, too.
  void expect_as_reference(const AttentionCase& c) {
    SCOPED_TRACE(c.name());
    const auto rounded = [](std::vector<double> x) {
      for (double& value : x) value = static_cast<double>(to_float(to_bf16(static_cast<float>(value))));
      return x;
    };
    const std::vector<double> qkv = rounded(c.random_qkv()), dout = rounded(c.random_dout());
    const AttentionResults actual = run_attention(*device_, Dtype::bf16, c, qkv, dout),
                           expected = run_attention(*reference_, Dtype::f32, c, qkv, dout);
    for (const auto& [a, e, tolerance, what] : {std::tuple{&actual.out, &expected.out, 0x1p-8, "out"},
                                                {&actual.lse, &expected.lse, 1e-6, "lse"},
                                                {&actual.dqkv, &expected.dqkv, 0x1p-7, "dqkv"}}) {
      const FiniteValues finite(*a, *e, what);
      EXPECT_TRUE(close(finite.found, finite.expected, 16 * tolerance)) << what;
    }
  }

  std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_;
  std::string why_not_;
};

TEST_F(CudnnAttention, IsThatOfTheReference) {
  for (const HeadLayout layout : {HeadLayout{1, 1, 64}, {4, 2, 128}, {2, 2, 128}, {3, 1, 40}, {2, 1, 256}})
    expect_as_reference({.batch = 2, .length = 70, .layout = layout, .sharpness = 1.5});
  for (const int64_t length : {2, 63, 64, 129}) expect_as_reference({.length = length, .layout = {2, 1, 64}});
}

TEST_F(CudnnAttention, SeesWindowsDocumentsAndSinks) {
  const HeadLayout layout{4, 2, 64};
  for (const int64_t window : {1, 2, 33, 200}) expect_as_reference({.batch = 2, .length = 70, .layout = layout, .window = window});
  expect_as_reference({.batch = 2, .length = 70, .layout = layout, .documents = {0, 1, 40}});
  expect_as_reference({.batch = 2, .length = 70, .layout = layout, .sinks = true});
  expect_as_reference({.batch = 2, .length = 70, .layout = layout, .window = 20, .documents = {0, 30}, .sinks = true, .sharpness = -1.5});
}

TEST_F(CudnnAttention, HasTheSameBitsAgainAndAtAnyAddress) {
  const AttentionCase c{.batch = 2, .length = 150, .layout = {2, 1, 64}, .sinks = true};
  const AttentionResults first = run_attention(*device_, Dtype::bf16, c);
  expect_same_attention(run_attention(*device_, Dtype::bf16, c), first);
  expect_same_attention(run_attention(*device_, Dtype::bf16, c, c.random_qkv(), c.random_dout(), 1), first);
}

// Writes how many results are not finite, of queries that do not see the key whose value and key are NaN: by cuDNN, and by our kernels,
// where there are none.
TEST_F(CudnnAttention, ReportsWhereNaNOfAHiddenKeyGoes) {
  const AttentionCase c{.length = 200, .layout = {1, 1, 64}, .documents = {0, 150}};
  std::vector<double> qkv = c.random_qkv();
  std::fill_n(qkv.begin() + 149 * c.layout.row() + 64, 128, std::nan(""));  // the last key of the first document, and its value
  const auto reached = [&](AttentionBy by) {
    device_->choose_attention(by);
    const AttentionResults found = run_attention(*device_, Dtype::bf16, c, qkv, c.random_dout());
    const auto count = [](const Tensor& x, int64_t first, int64_t end) {
      const std::vector<double> all = values(x.slice(first, end));
      return std::ranges::count_if(all, [](double value) { return !std::isfinite(value); });
    };
    return std::array{count(found.out, 0, 149), count(found.out, 150, 200), count(found.dqkv, 150, 200)};
  };
  const auto own = reached(AttentionBy::own), by_cudnn = reached(AttentionBy::cudnn);
  EXPECT_EQ(own, (std::array<std::ptrdiff_t, 3>{}));
  std::cout << "NaN of a hidden key, by " << cudnn_text(device_->attention_device().library) << ": not finite are " << by_cudnn[0]
            << " elements of out before it, " << by_cudnn[1] << " behind it, and " << by_cudnn[2] << " of the gradients behind it\n";
}

}  // namespace mantissa::test::cudnn_attention_test
