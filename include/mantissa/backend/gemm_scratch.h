// Estimates the memory that GEMMs of the backend "cpu" take from its allocator while they run, beside their operands.
#pragma once

#include <cstdint>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// out [rows, cols] = a [rows, depth] * b [depth, cols].
struct GemmSizes {
  double rows, depth, cols;  // an estimate may be asked for what no machine has
  bool a_quantized = false, b_quantized = false;
  bool sums = false;     // into an fp32 output, as the gradient of a weight
  int64_t matrices = 1;  // b of a GroupedGemm: each group of rows has its own
};

// Returns the bytes of dequantized operands, the same on every CPU. bf16 operands of a GEMM in fp32 are widened a tile at a time, and
// scales that bf16 cannot follow (extreme ones) are not counted.
double gemm_scratch(const GemmSizes& operands);

}  // namespace mantissa
