// Tensors from a backend, conversions and quantisation.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

Tensor empty(Backend& device, Dtype dtype, Shape shape);  // not initialised
Tensor empty_like(const Tensor& tensor);
Tensor zeros(Backend& device, Dtype dtype, Shape shape);
Tensor from_host(Backend& device, Dtype dtype, Shape shape, const void* data);  // copies
Tensor converted(const Tensor& tensor, Dtype dtype);                            // a new tensor, or the same handle if the dtype is the same

// `length` rounded up to whole blocks.
inline int64_t whole_blocks(int64_t length, int64_t block) { return (length + block - 1) / block * block; }

QuantizedTensor empty_quantized(Backend& device, Shape shape, const Quantization& how);  // not initialised
// The rows of x are padded with zeros to whole blocks of `how`; quantized_padded() pads them to whole blocks of its transpose, too, so that
// columnwise codes can follow from rowwise ones.
QuantizedTensor quantized(const Tensor& x, const Quantization& how);
QuantizedTensor quantized_padded(const Tensor& x, const Quantization& how);
// Rows [begin, end), both at block borders (or, rowwise, anywhere).
QuantizedTensor slice(const QuantizedTensor& tensor, int64_t begin, int64_t end);

// fp64 for fp64 values, else fp32: the dtype of statistics, losses and gradients that go with values of `dtype`.
inline Dtype stats_dtype(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

}  // namespace mantissa
