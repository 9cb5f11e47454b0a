// Says how much memory GEMMs of the backend "cpu" take from its allocator while they run, beside their operands.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

// Return the bytes of dequantized operands, the same on every CPU. bf16 operands of a GEMM in fp32 are widened a tile at a time, and scales
// that bf16 cannot follow (extreme ones) are not counted. The groups of GroupedWeightGradient are taken to have equally many rows.
int64_t gemm_scratch(const Gemm& k);
int64_t gemm_scratch(const GroupedGemm& k);
int64_t gemm_scratch(const GroupedWeightGradient& k);

}  // namespace mantissa
