// Quantized operands of GEMMs as values, and the reference's GEMMs of them in one wider dtype; both are exact.
#pragma once

#include "mantissa/backend/functions.h"

namespace mantissa {

// `value` in high precision: dequantized, or converted. extreme as in Dequantize.
Tensor high_precision(const Value& value, Dtype dtype, const Tensor& extreme = {});

// Columns [first, first + width) of op(b), whole blocks of a quantized b, dequantized; stored as b is.
Tensor dequantized_columns(const Operand& b, Dtype dtype, int64_t first, int64_t width, const Tensor& extreme);

// GEMM(k, a Gemm or GroupedGemm, with an out and bias of dtype `wide`, fp32 or fp64); out is rounded once at the end if it is bf16.
template <class Kernel, class Multiply>
void multiply_widened(Backend& device, const Kernel& k, Dtype wide, const Multiply& gemm) {
  const bool rounds = k.out.dtype() == Dtype::bf16;
  Kernel widened = k;
  if (rounds) widened.out = empty(device, wide, k.out.shape());
  if constexpr (requires { k.bias; }) {
    if (k.bias.defined()) widened.bias = converted(k.bias, wide);
  }
  gemm(widened);
  if (rounds) device.run(Convert{.x = widened.out, .out = k.out});
}

}  // namespace mantissa
