#include "gpu/primitives.h"

#include <gtest/gtest.h>

namespace mantissa::gpu {

void PrintTo(const Primitive& primitive, std::ostream* out) { *out << primitive.name; }

}  // namespace mantissa::gpu

namespace mantissa::primitives_test {

class Primitives : public ::testing::TestWithParam<gpu::Primitive> {};

TEST_P(Primitives, DoWhatDeviceCodeAsksOfThem) { EXPECT_EQ(GetParam().difference(), ""); }

INSTANTIATE_TEST_SUITE_P(Of, Primitives, ::testing::ValuesIn(gpu::primitives()), [](const auto& c) { return std::string(c.param.name); });

}  // namespace mantissa::primitives_test
