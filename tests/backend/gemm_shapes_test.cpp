// GEMMs of random shapes: some here, thousands in slow/gemm_many_shapes_test.cpp.
#include "gemm_shapes.h"

namespace mantissa::test::gemm_shapes_test {

class GemmShapes : public ::testing::TestWithParam<uint32_t> {};

TEST_P(GemmShapes, GiveTheGemmOfTheReference) {
  constexpr uint32_t kEach = 50, kTried = 20;
  const int64_t banded = expect_gemms(GetParam() * kEach, kTried);
  EXPECT_GE(5 * banded, kTried) << "too few weights are wide and deep enough to be cut into column blocks";
}

INSTANTIATE_TEST_SUITE_P(, GemmShapes, ::testing::Range(0U, 6U));

// The input gradient of a wide layer: column blocks of 384 columns, and 256 left for the last.
TEST_F(OnAllBackends, TheLastColumnBlockOfAWeightMayBeNarrowerThanATile) {
  const GemmCase dgrad{.m = 64, .n = 1024, .k = 6144, .b = {Format::e4m3, 32, 32}, .dense = Dtype::bf16, .out = Dtype::f32};
  for (Backend* device : tested()) EXPECT_TRUE(gemms_agree(*device, reference(), dgrad, 1));
}

}  // namespace mantissa::test::gemm_shapes_test
