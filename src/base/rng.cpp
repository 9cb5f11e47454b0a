#include "mantissa/base/rng.h"

#include <cmath>
#include <numbers>

namespace mantissa {

float random_normal(RngKey key, uint32_t what, uint64_t index) {
  const auto words = random_words(key, what, index);
  const double u = (static_cast<double>(words[0]) + 1.0) * 0x1p-32;  // (0, 1]: the logarithm is finite
  const double v = static_cast<double>(words[1]) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v));
}

}  // namespace mantissa
