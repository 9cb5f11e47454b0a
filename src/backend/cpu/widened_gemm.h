// Products whose operands are first brought to one wider dtype, exactly: quantised operands, and bf16 where the CPU has no bf16 dot
// product.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

// `value` in high precision: dequantised, or converted. extreme as in Dequantize.
Tensor high_precision(const Value& value, Dtype dtype, const Tensor& extreme = {});

// Columns [first, first + width) of op(b), whole blocks of a quantised b, dequantised; stored as b is.
Tensor dequantized_band(const Operand& b, Dtype dtype, int64_t first, int64_t width, const Tensor& extreme);

// k with operands and bias widened to `wide` (fp32 or fp64); out is rounded once at the end if it is bf16.
void multiply_widened(Backend& device, const Gemm& k, Dtype wide);

}  // namespace mantissa
