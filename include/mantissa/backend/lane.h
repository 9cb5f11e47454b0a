// Says in which lane of a device this thread works. A device does things in order within a lane; there are two, which run beside each
// other. A CPU has one.
#pragma once

#include <cstdint>

namespace mantissa {

enum class Lane : uint8_t { compute, communication };

Lane current_lane();  // lane of this thread; compute unless a scope says otherwise

// Until the end of the block, the kernels, copies and memory that this thread asks a device for belong to the lane.
class LaneScope {
 public:
  explicit LaneScope(Lane lane);
  ~LaneScope();
  LaneScope(const LaneScope&) = delete;
  LaneScope& operator=(const LaneScope&) = delete;

 private:
  Lane outer_;
};

}  // namespace mantissa
