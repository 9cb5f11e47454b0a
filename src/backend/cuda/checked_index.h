// Indices of kernels that a host may have given wrong.
#pragma once

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/reduce.h"

namespace mantissa::gpu {

// Returns whether the rule allows value number `index`. A kernel must not use one that it refuses.
__device__ inline bool allowed(ErrorWord* error, const IndexRule& rule, int64_t index, int64_t value) {
  if (rule.allows(value)) return true;
  if (fetch_or(&error->taken, 1U) == 0) {
    error->value = value;
    error->index = index;
    error->rule = rule;
  }
  return false;
}

// Returns value number i, or -1 where it is refused.
__device__ inline int64_t checked(const CheckedIndices& of, int64_t i) {
  return allowed(of.error, of.rule, i, of.values[i]) ? of.values[i] : -1;
}

// Returns the first i in [0, count) for which bad(i), or count; a CPU would report the same i. All threads of the block call it, and get
// the same.
template <class Bad>
__device__ inline int64_t first_bad(int64_t count, Bad bad) {
  int64_t i = thread();
  while (i < count && !bad(i)) i += threads();
  return join_block(i < count ? i : count, count, Least<int64_t>());
}

}  // namespace mantissa::gpu
