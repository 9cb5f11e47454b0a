// Reports of the kernels of a lane to the host, in device memory: whoever waits for the lane reads them.
#pragma once

#include "backend/index_rule.h"

namespace mantissa::gpu {

struct ErrorWord {  // zeros, until the first index that is out of range fills it; then the host throws
  uint32_t taken;
  int64_t value, index;
  IndexRule rule;
};

struct LaneReport {
  ErrorWord error;
  uint32_t fp32_gemms;  // GEMMs in fp32 that codes with extreme scales have led to
};

// A condition on the device for a kernel to do its work.
struct OnlyIf {
  const int32_t* flag = nullptr;   // down: no work; null: it is done in any case
  uint32_t* fp32_gemms = nullptr;  // counts the times that the flag was up
};

struct CheckedIndices {  // an operand, which kernels read by checked()
  const int32_t* values;
  IndexRule rule;
  ErrorWord* error;
};

}  // namespace mantissa::gpu
