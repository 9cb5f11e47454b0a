// The GEMMs of gemm_shapes_test, thousands of them.
#include "backend/cpu/fast/gemm/packed_gemm.h"
#include "gemm_shapes.h"

namespace mantissa::test::gemm_many_shapes_test {

class GemmManyShapes : public ::testing::TestWithParam<uint32_t> {};

TEST_P(GemmManyShapes, GiveTheGemmOfTheReference) {
  constexpr uint32_t kCases = 300;  // the suite tries some of the first of these
  const int64_t banded = expect_gemms(GetParam() * kCases, kCases);
  EXPECT_GE(4 * banded, kCases);
}

INSTANTIATE_TEST_SUITE_P(, GemmManyShapes, ::testing::Range(0U, 19U));

}  // namespace mantissa::test::gemm_many_shapes_test
