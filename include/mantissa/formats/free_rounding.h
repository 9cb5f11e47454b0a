// Rounds to the elements of a free format, in fp64, where every step is exact.
#pragma once

#include <cstdint>

#include "mantissa/formats/free_element.h"

namespace mantissa {

// 2^n, n a normal exponent of fp64.
inline double power_of_two(int32_t n) { return __builtin_bit_cast(double, static_cast<uint64_t>(n + 1023) << 52); }

class ElementGrid {
 public:
  explicit ElementGrid(const FreeElement& of)
      : mantissa_bits_(of.mantissa_bits),
        least_binade_(1 - of.bias()),
        largest_(power_of_two(of.facts().emax) * (1.0 + of.facts().max_fraction * 0x1p-23)) {}

  double largest() const { return largest_; }

  // The element nearest to y, ties to an even number of steps. y is not NaN. Beyond the largest element the result is the largest; the sign
  // is kept, also that of zero.
  double nearest(double y) const {
    return rounded(y, [](int64_t below, double rest) { return rest > 0.5 || (rest == 0.5 && (below & 1) != 0); });
  }
  // Rounds y to its upper neighbor with the probability (y - lower neighbor) / step, to 2^-32 for a uniform word, else to the lower one: so
  // the mean is y.
  double at_random(double y, uint32_t word) const {
    return rounded(y, [word](int64_t, double rest) { return rest > word * 0x1p-32; });
  }

 private:
  // The distance of elements is that of their binade, and below the smallest normal that of the least.
  template <class Up>
  double rounded(double y, const Up& up) const {
    const double magnitude = __builtin_fmin(__builtin_fabs(y), largest_);
    const int32_t own = static_cast<int32_t>(__builtin_bit_cast(uint64_t, magnitude) >> 52) - 1023;
    const int32_t step = (own > least_binade_ ? own : least_binade_) - mantissa_bits_;
    const double steps = magnitude * power_of_two(-step);
    const auto below = static_cast<int64_t>(steps);
    const int64_t nearest = up(below, steps - static_cast<double>(below)) ? below + 1 : below;
    return __builtin_copysign(static_cast<double>(nearest) * power_of_two(step), y);
  }

  int32_t mantissa_bits_, least_binade_;
  double largest_;
};

}  // namespace mantissa
