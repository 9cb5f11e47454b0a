// NaN and Inf in floating-point values, found by their bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// Index of the first value that is NaN or Inf; -1 if there is none, and for integers.
int64_t first_nonfinite(Dtype dtype, std::span<const std::byte> values);

// That value of a tensor in host memory, as "layers.0.mlp.down.weight[5] = nan"; "" if there is none.
std::string nonfinite_text(const std::string& name, const Tensor& tensor);

}  // namespace mantissa
