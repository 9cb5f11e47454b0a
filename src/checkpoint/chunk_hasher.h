// Hashes the chunks of a shard, and names the shard.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/base/hash.h"
#include "mantissa/checkpoint/checkpoint_writer.h"

namespace mantissa {

// Hashes every kCheckpointChunkBytes of a stream that arrives in parts; the last chunk may be short.
class ChunkHasher {
 public:
  void update(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const size_t taken = std::min(bytes.size(), static_cast<size_t>(kCheckpointChunkBytes) - filled_);
      chunk_.update(bytes.first(taken));
      bytes = bytes.subspan(taken);
      filled_ += taken;
      if (filled_ == kCheckpointChunkBytes) end_chunk();
    }
  }
  std::vector<Hash64> finish() {
    if (filled_ > 0) end_chunk();
    return std::move(hashes_);
  }

 private:
  void end_chunk() {
    hashes_.push_back(chunk_.finish());
    filled_ = 0;
  }

  StreamHash chunk_;
  size_t filled_ = 0;
  std::vector<Hash64> hashes_;
};

inline std::string shard_name(int64_t shard) {
  const std::string digits = text(shard);
  return "shard-" + std::string(5 - std::min<size_t>(5, digits.size()), '0') + digits + ".safetensors";
}

}  // namespace mantissa
