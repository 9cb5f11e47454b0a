// The GELU of every bf16 number against the definition: as exact as rounding to bf16 allows, far out in the tail, too.
#include <cmath>

#include "kernel_backends.h"
#include "testing.h"

namespace mantissa::gelu_values_test {

constexpr double kRounding = 0x1p-8;  // rounding of bf16, relative

std::vector<bf16> all_numbers() {
  std::vector<bf16> out;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) out.push_back(bf16{static_cast<uint16_t>(bits)});
  return out;
}

double exact(double x) { return 0.5 * x * std::erfc(-x / std::sqrt(2.0)); }

class GeluValues : public test::OnEachBackend {};
INSTANTIATE_TEST_SUITE_P(, GeluValues, ::testing::ValuesIn(test::tested_backends()), test::backend_of);

TEST_P(GeluValues, OfErfAreExactUpToTheRounding) {
  const std::vector<bf16> numbers = all_numbers();
  const Tensor x = from_host(device(), Dtype::bf16, {0x10000}, numbers.data()), out = empty_like(x);
  device().run(GeluForward{.x = x, .out = out, .form = GeluForm::erf});
  const std::vector<bf16> results = to_host<bf16>(out);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double from = static_cast<double>(to_float(numbers[i])), to = static_cast<double>(to_float(results[i])), expected = exact(from);
    if (std::isnan(from)) {
      EXPECT_TRUE(std::isnan(to)) << "of NaN " << i;
    } else if (std::isinf(from)) {
      EXPECT_TRUE(from < 0.0 ? std::abs(to) < 1e-36 : to == from) << from;
    } else if (from < -12.9) {  // the result is less than 4e-37
      EXPECT_LE(std::abs(to), 1e-36) << from;
    } else if (std::abs(from) > 1e-30) {
      EXPECT_NEAR(to, expected, (kRounding + 5e-4) * std::abs(expected)) << from;
    }
  }
}

}  // namespace mantissa::gelu_values_test
