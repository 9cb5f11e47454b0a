// The GEMMs of gemm_shapes_test, thousands of them.
#include "backend/cpu/fast/gemm_engine.h"
#include "gemm_shapes.h"

namespace mantissa::test::gemm_many_shapes_test {

class GemmManyShapes : public ::testing::TestWithParam<uint32_t> {};

TEST_P(GemmManyShapes, GiveTheGemmOfTheReference) {
  constexpr uint32_t kFirst = 1000, kCases = 300;  // the suite's come before
  const int64_t banded = expect_gemms(kFirst + GetParam() * kCases, kCases);
  EXPECT_GE(4 * banded, kCases);
}

INSTANTIATE_TEST_SUITE_P(, GemmManyShapes, ::testing::Range(0U, 18U));

}  // namespace mantissa::test::gemm_many_shapes_test
