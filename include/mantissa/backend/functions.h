// Tensors from a backend, and conversions.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

Tensor empty(Backend& device, Dtype dtype, Shape shape);  // not initialised
Tensor empty_like(const Tensor& tensor);
Tensor zeros(Backend& device, Dtype dtype, Shape shape);
Tensor from_host(Backend& device, Dtype dtype, Shape shape, const void* data);  // copies
Tensor converted(const Tensor& tensor, Dtype dtype);                            // a new tensor, or the same handle if the dtype is the same

// fp64 for fp64 values, else fp32: the dtype of statistics, losses and gradients that go with values of `dtype`.
inline Dtype stats_dtype(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

}  // namespace mantissa
