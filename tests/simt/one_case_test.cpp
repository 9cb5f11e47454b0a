// One case of every kernel of CUDA on the executor. Under ThreadSanitizer every thread of a block is one of its own, which only barriers
// order.
#include "kernel_backends.h"
#include "kernel_cases.h"

namespace mantissa::test::one_case_test {

class OneCase : public ::testing::TestWithParam<std::string> {};

TEST_P(OneCase, IsThatOfTheReference) {
  const auto reference = make_backend("cpu_reference"), cuda = make_backend("cuda");
  const auto c = std::ranges::find(kernel_cases(), GetParam(), &KernelCase::kernel);
  ASSERT_NE(c, kernel_cases().end());
  Operands expected(*reference, Dtype::bf16), actual(*cuda, Dtype::bf16);
  c->run(expected);
  c->run(actual);
  for (size_t i = 0; i < expected.results().size(); ++i) {
    const Operands::Result& e = expected.results()[i];
    const Operands::Result& a = actual.results()[i];
    EXPECT_TRUE(close(a.tensor, e.tensor, a.tolerance.bf16)) << c->variant << ": " << e.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, OneCase, ::testing::ValuesIn(kernel_names()), [](const auto& c) { return c.param; });

}  // namespace mantissa::test::one_case_test
