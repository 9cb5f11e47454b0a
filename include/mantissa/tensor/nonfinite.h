// Finds NaN and Inf in floating-point values by their bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// Returns the index of the first value that is NaN or Inf; -1 if there is none, and for integers.
int64_t first_nonfinite(Dtype dtype, std::span<const std::byte> values);

}  // namespace mantissa
