// Describes the content of a checkpoint, and writes its files: one shard by each process that saves, and the manifest that names them all.
// CheckpointDirectory, above this, gives the folder its name and publishes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/file.h"
#include "checkpoint/checkpoint_manifest.h"

namespace mantissa {

// A tensor, or what one process saves of it, that does not change while it is saved. The boxes are in global coordinates; their values
// follow each other in `data`, each row-major. Without boxes, data is the whole tensor as it stands. All shards together tile `shape`.
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

// One shard as the manifest names it: the file, and of each tensor the pieces in it.
struct ShardEntry {
  Shard shard;
  std::vector<ManifestTensor> tensors;

  void fields(auto& v) {
    v("shard", shard);
    v("tensors", tensors);
  }
};

// Describes shard number `shard`, hashed from the memory and not from a file, so that damage on the way to the disk is found at load.
// Throws Error(numerical) naming tensor and index if a floating-point value is NaN or Inf: such a state is never saved; Error(internal) if
// boxes and data do not fit. `progressed` is called after each part of kCheckpointChunkBytes or less: a large shard takes minutes.
ShardEntry describe_shard(const std::vector<CheckpointTensor>& tensors, int64_t shard, int64_t step, const Progressed& progressed = {});

// Returns the complete manifest of the shards 0, 1, ... Throws Error(internal) if names or boxes do not fit together.
Manifest assemble_manifest(const CheckpointHead& head, const std::vector<ShardEntry>& shards);

// Write into an existing folder. The files are on the disk on return, except for the name of a shard: write_manifest, which comes last,
// syncs the folder. Throw Error(storage).
void write_shard(const std::vector<CheckpointTensor>& tensors, const ShardEntry& entry, const std::filesystem::path& folder,
                 const Progressed& progressed = {});
void write_manifest(const Manifest& manifest, const std::filesystem::path& folder);

}  // namespace mantissa
