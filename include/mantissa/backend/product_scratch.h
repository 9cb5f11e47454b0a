// What matrix products of the backend "cpu" take from its allocator while they run, beside their operands: for estimates of memory.
#pragma once

#include <cstdint>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// out [rows, cols] = a [rows, depth] * b [depth, cols].
struct ProductOperands {
  double rows, depth, cols;  // an estimate may be asked for what no machine has
  Dtype dtype = Dtype::f32;  // of what is not quantised
  bool a_quantized = false, b_quantized = false;
  bool sums = false;     // into an fp32 output, as the gradient of a weight
  int64_t matrices = 1;  // b of a GroupedGemm: each group of rows has its own
};

// Bytes of operands that are not in the dtype of the product, of the output that is rounded at its end, and of quantised operands
// dequantised. A product of bf16 operands is one in fp32 where the CPU has no bf16 dot product.
double product_scratch(const ProductOperands& operands);

}  // namespace mantissa
