// One case of every kernel of CUDA on the executor. Under ThreadSanitizer every thread of a block is one of its own, which only barriers
// order.
#include <functional>
#include <limits>

#include "kernel_backends.h"
#include "kernel_cases.h"

namespace mantissa::test::one_case_test {

void expect_as_reference(const std::function<void(Operands&)>& run, Operands::Memory memory = Operands::Memory::aligned) {
  const auto reference = make_backend("cpu_reference"), cuda = make_backend("cuda");
  Operands expected(*reference, Dtype::bf16), actual(*cuda, Dtype::bf16, memory);
  run(expected);
  run(actual);
  for (size_t i = 0; i < expected.results().size(); ++i) {
    const Operands::Result& e = expected.results()[i];
    const Operands::Result& a = actual.results()[i];
    EXPECT_TRUE(close(a.tensor, e.tensor, a.tolerance.bf16)) << e.name;
  }
}

class OneCase : public ::testing::TestWithParam<std::string> {};

TEST_P(OneCase, IsThatOfTheReference) {
  // Takes another case than the first, in which many a kernel has one element, and nothing to hand over.
  const KernelCase* chosen = nullptr;
  for (size_t i = 0, found = 0; i < kernel_cases().size() && found < 2; ++i) {
    if (kernel_cases()[i].kernel == GetParam()) chosen = &kernel_cases()[i], ++found;
  }
  ASSERT_NE(chosen, nullptr);
  if (!has_kernel(*make_backend("cuda"), chosen->kernel)) return;
  SCOPED_TRACE(chosen->variant);
  expect_as_reference(chosen->run);
}

INSTANTIATE_TEST_SUITE_P(Kernels, OneCase, ::testing::ValuesIn(kernel_names()), [](const auto& c) { return c.param; });

// Lanes hand over whole rows of experts, groups of them, and weights.
class AmongLanes : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(AmongLanes, IsThatOfTheReference) {
  const auto& [kernel, variant] = GetParam();
  const auto found = std::ranges::find_if(kernel_cases(), [&](const KernelCase& c) { return c.kernel == kernel && c.variant == variant; });
  ASSERT_NE(found, kernel_cases().end());
  expect_as_reference(found->run);
}

INSTANTIATE_TEST_SUITE_P(Kernels, AmongLanes,
                         ::testing::Combine(::testing::Values("RouteForward", "RouteBackward"),
                                            ::testing::Values("softmax_renormalized", "sigmoid_groups")),
                         [](const auto& c) { return std::get<0>(c.param) + "_" + std::get<1>(c.param); });

TEST(ManyThreads, FindNonfiniteValues) {
  const auto cuda = make_backend("cuda");
  Operands o(*cuda, Dtype::bf16);
  const Tensor x = o.given(Dtype::bf16, {64, 64}, std::vector<double>(64 * 64, std::numeric_limits<double>::quiet_NaN()));
  const Quantization how{.format = Format::e4m3, .block_rows = 1, .block_cols = 32};
  const Tensor nonfinite = index_output(o, "nonfinite", {1});
  cuda->run(Fill{.out = nonfinite, .value = 0.0});
  cuda->run(Quantize{.x = x, .out = quantized_output(o, "codes", "scales", {64, 64}, how), .nonfinite = nonfinite});
  EXPECT_EQ(values(nonfinite), std::vector{1.0});
}

// Heads are those that tensor cores take, with documents and with a cache, in tiles that are not full, wherever operands begin. Keys of the
// cache take several steps, the third of which is copied over the first.
class OnTensorCores : public ::testing::TestWithParam<int64_t> {};

TEST_P(OnTensorCores, AttentionIsThatOfTheReference) {
  const HeadLayout layout{.heads = 1, .kv_heads = 1, .head_dim = GetParam()};
  for (const Operands::Memory memory : {Operands::Memory::aligned, Operands::Memory::misaligned}) {
    if (memory == Operands::Memory::misaligned && GetParam() == 128) break;  // the kernels see no difference
    expect_as_reference([&](Operands& o) { attention_case(o, 1, 40, layout, {.segments = true, .window = 0}); }, memory);
    expect_as_reference([&](Operands& o) { attention_backward_case(o, 1, 40, layout, {.segments = true, .window = 0}); }, memory);
    expect_as_reference([&](Operands& o) { cached_attention_case(o, 160, 20, layout, {.segments = false, .window = 0}); }, memory);
  }
}

INSTANTIATE_TEST_SUITE_P(Channels, OnTensorCores, ::testing::Values(64, 128), [](const auto& c) { return std::to_string(c.param); });

}  // namespace mantissa::test::one_case_test
