// Moves a batch of the data layer to the device.
#pragma once

#include "mantissa/data/batch.h"
#include "mantissa/models/gpt.h"

namespace mantissa {

struct DeviceBatch {
  TokenBatch tokens;
  Tensor targets;  // [batch * length] i32
};

// Uploads sequences [first, first + count) of the batch to the device of the model. Kernels trust indices, since a device cannot throw, so
// every id, target, position and segment start is checked here. Throws Error(data) for an id or a target outside the vocabulary,
// Error(internal) for the others, naming sequence and position.
DeviceBatch to_device(const Gpt& model, const Batch& batch, int64_t first, int64_t count);

}  // namespace mantissa
