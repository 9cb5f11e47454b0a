// A backend for running a model without data: kernels check their contracts and compute nothing, and memory is counted but does not exist.
// The real forward and backward pass then tells what it allocates, also for models that no machine could hold.
#pragma once

#include <memory>

#include "mantissa/backend/backend.h"

namespace mantissa {

// Returns a backend whose allocator counts as that of "cpu" does, including the memory that GEMMs take while they run. Tensors lie at
// addresses that no process has; whoever reads or writes them ends in a segmentation fault. A download gives zeros, except for the offsets
// of a dispatch: each of `expert_ranks` ranks gets as many assignments, and so does each of its experts, as far as they can be divided.
std::unique_ptr<Backend> dry_backend(int64_t expert_ranks = 1);

// Returns whether the bytes are those of a tensor of a dry backend.
bool is_dry(const std::byte* bytes);

// Return how many bytes GEMMs of the backend "cpu" take from its allocator while they run, beside their operands: those of dequantized
// operands, the same on every CPU. In cpu/fast/gemm/gemm.cpp. bf16 operands of a GEMM in fp32 are widened a tile at a time, and scales
// that bf16 cannot follow (extreme ones) are not counted. The groups of GroupedWeightGradient are taken to have equally many rows.
int64_t gemm_scratch(const Gemm& k);
int64_t gemm_scratch(const GroupedGemm& k);
int64_t gemm_scratch(const GroupedWeightGradient& k);

}  // namespace mantissa
