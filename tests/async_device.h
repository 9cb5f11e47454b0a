// A device that works later than it is asked to: each lane is a thread, which waits at random before it does the next thing.
#pragma once

#include "closed_device.h"
#include "lane_thread.h"

namespace mantissa::test {

class AsyncDevice final : public ClosedDevice {
 public:
  explicit AsyncDevice(uint32_t seed = 1) : lanes_{std::make_unique<LaneThread>(seed), std::make_unique<LaneThread>(seed + 1)} {}
  ~AsyncDevice() override {
    for (const auto& lane : lanes_) lane->end();  // the other one may follow it
  }

  // A mark that no lane reaches; what follows it comes when the device ends.
  static Mark never() { return std::make_shared<LanePoint>(true); }

  const char* name() const override { return "async"; }
  Mark mark() override { return lane(current_lane()).mark(); }
  void follow(const Mark& mark) override {
    if (mark) lane(current_lane()).follow(point_of(mark));
  }
  bool reached(const Mark& mark) const override { return !mark || point_of(mark)->is_reached(); }
  double seconds(const Mark& from, const Mark& to) const override { return point_of(from)->seconds_until(*point_of(to)); }

 protected:
  void submit(Lane to, std::function<void()> item) override { lane(to).submit(std::move(item)); }
  void wait_for(const Mark& mark) override {
    while (!point_of(mark)->await()) heed_interrupt();
    for (const auto& lane : lanes_) lane->rethrow();
  }

 private:
  static std::shared_ptr<const LanePoint> point_of(const Mark& mark) { return std::static_pointer_cast<const LanePoint>(mark); }
  LaneThread& lane(Lane which) { return *lanes_[static_cast<size_t>(which)]; }

  std::array<std::unique_ptr<LaneThread>, 2> lanes_;
};

}  // namespace mantissa::test
