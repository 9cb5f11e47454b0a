// What goes into a checkpoint, and the writing of one complete folder. CheckpointDirectory, above this, gives it its name and publishes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "mantissa/io/checkpoint_manifest.h"

namespace mantissa {

// A tensor that does not change while it is saved. The boxes, in global coordinates, tile it; their values follow each other in `data`,
// each row-major. No boxes: data is the whole tensor as it stands.
struct CheckpointTensor {
  std::string name;
  Shape shape;
  std::vector<Box> boxes;
  Tensor data;
};

struct CheckpointContent : CheckpointHead {
  std::vector<CheckpointTensor> tensors;
};

inline constexpr int64_t kCheckpointChunkBytes = 4 << 20;

// The complete manifest, hashed from the memory and not from a file, so that damage on the way to the disk is found at load.
// Throws Error(internal) if names or boxes do not fit.
Manifest describe_checkpoint(const CheckpointContent& content);

// Throws Error(numerical) naming tensor and index if a floating-point value is NaN or Inf: such a state is never saved.
void require_finite(const CheckpointContent& content);

// Makes the folder, which must not exist, and writes the shard, then, when that is on the disk, the manifest; all synced. On Error(storage)
// the folder is removed again.
void write_checkpoint(const CheckpointContent& content, const Manifest& manifest, const std::filesystem::path& directory);

}  // namespace mantissa
