// Says where a training run is, so that operations round at random by bits that depend on what is rounded alone. Outside of a scope they
// round to nearest.
#pragma once

#include <cstdint>

namespace mantissa {

struct RoundingPosition {
  uint64_t seed = 0;
  int64_t step = 0;   // steps before
  int64_t token = 0;  // of the run, all ranks and steps: the first one of the tensors at hand
};

// Sets the position of this thread until the end of the block.
class RoundingScope {
 public:
  explicit RoundingScope(const RoundingPosition& position);
  ~RoundingScope();
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  RoundingPosition position_;
  const RoundingPosition* previous_;
};

const RoundingPosition* rounding_position();  // null outside of a scope

}  // namespace mantissa
