// What kernels say of an index that is out of range, in device memory of their lane: whoever waits for the lane throws it.
#pragma once

#include "backend/index_rule.h"

namespace mantissa::gpu {

struct ErrorWord {  // zeros, until the first such index fills it
  uint32_t taken;
  int64_t value, index;
  IndexRule rule;
};

struct CheckedIndices {  // an operand, which kernels read by checked()
  const int32_t* values;
  IndexRule rule;
  ErrorWord* error;
};

}  // namespace mantissa::gpu
