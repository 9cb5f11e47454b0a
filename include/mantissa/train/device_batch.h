// A batch of the data layer on the device.
#pragma once

#include "mantissa/data/batch.h"
#include "mantissa/models/gpt.h"

namespace mantissa {

struct DeviceBatch {
  TokenBatch tokens;
  Tensor targets;  // [batch * length] i32
};

// Sequences [first, first + count) of the batch.
DeviceBatch to_device(Backend& device, const Batch& batch, int64_t first, int64_t count);

}  // namespace mantissa
