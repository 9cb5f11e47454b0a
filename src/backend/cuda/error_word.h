// What kernels say of an index that is out of range, in device memory of their lane: whoever waits for the lane throws it.
#pragma once

#include "backend/index_rule.h"

namespace mantissa::gpu {

struct ErrorWord {  // zeros, until the first such index fills it
  uint32_t taken;
  int32_t value;
  int64_t index;
  IndexRule rule;
};

}  // namespace mantissa::gpu
