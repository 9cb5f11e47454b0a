// Holds the position of a training run, so that operations that round at random draw bits which depend on what is rounded alone. Outside of
// a scope they round to nearest.
#pragma once

#include <cstdint>

namespace mantissa {

struct RoundingPosition {
  uint64_t seed = 0;
  int64_t step = 0;   // steps before
  int64_t token = 0;  // number, in the run of all ranks and steps, of the first token of the tensors at hand
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
