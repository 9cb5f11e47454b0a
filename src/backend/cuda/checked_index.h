// Indices of kernels that a host may have given wrong.
#pragma once

#include "backend/cuda/error_word.h"
#include "gpu/device.h"

namespace mantissa::gpu {

// Returns whether the rule allows value number `index`. A kernel must not use one that it refuses.
__device__ inline bool allowed(ErrorWord* error, const IndexRule& rule, int64_t index, int32_t value) {
  if (rule.allows(value)) return true;
  if (fetch_or(&error->taken, 1U) == 0) {
    error->value = value;
    error->index = index;
    error->rule = rule;
  }
  return false;
}

}  // namespace mantissa::gpu
