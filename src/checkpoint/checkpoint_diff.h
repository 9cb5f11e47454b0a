// Compares two checkpoints.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "io/safetensors.h"

namespace mantissa {

struct TensorDifference {
  std::string name;
  std::string what;  // "only in the first", "fp32 [2, 3] and fp32 [3, 2]", "5 of 6 elements, the first at 0"
};

// Compares all tensors bit for bit, however they are cut into pieces; ordered by name, empty if they are equal. Throws CheckpointDamage if
// a byte cannot be trusted.
std::vector<TensorDifference> diff_checkpoints(CheckpointReader& a, CheckpointReader& b);
// Compares the folders of two models, whose tensors may be of any type.
std::vector<TensorDifference> diff_folders(SafetensorsFolder& a, SafetensorsFolder& b);

}  // namespace mantissa
