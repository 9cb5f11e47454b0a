// Times what a device does by marks in its lanes, because a host that only asks for it does not see when it is done.
#pragma once

#include <chrono>

#include "mantissa/backend/backend.h"

namespace mantissa {

// A point in this thread's lane of a device, or in time where a device has no marks.
class Moment {
 public:
  explicit Moment(Backend& device) : device_(&device), mark_(device.mark()) {}
  // Returns the seconds between two moments that the device has reached.
  double seconds_until(const Moment& later) const {
    if (mark_ && later.mark_) return device_->seconds(mark_, later.mark_);
    return std::chrono::duration<double>(later.host_ - host_).count();
  }

 private:
  Backend* device_;
  Backend::Mark mark_;
  std::chrono::steady_clock::time_point host_ = std::chrono::steady_clock::now();
};

}  // namespace mantissa
