// A device that works later than it is asked to: each lane is a thread, which waits at random before it does the next thing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>

#include "closed_device.h"

namespace mantissa::test {

class AsyncDevice final : public ClosedDevice {
 public:
  explicit AsyncDevice(uint32_t seed = 1) {
    for (size_t i = 0; i < lanes_.size(); ++i)
      lanes_[i].thread = std::thread([this, i, seed] { work(lanes_[i], seed + static_cast<uint32_t>(i)); });
  }
  ~AsyncDevice() override {
    stopping_ = true;
    for (LaneThread& lane : lanes_) {
      {
        const std::lock_guard lock(lane.mutex);
        lane.closing = true;
        lane.changed.notify_all();
      }
      lane.thread.join();
    }
  }

  // A mark that no lane reaches; what follows it comes when the device ends.
  static Mark never() { return std::make_shared<Point>(true); }

  const char* name() const override { return "async"; }
  Mark mark() override {
    const auto point = std::make_shared<Point>();
    submit(current_lane(), [point] { point->reach(); });
    return point;
  }
  void follow(const Mark& mark) override {
    if (!mark) return;
    submit(current_lane(), [this, point = point_of(mark)] {
      while (!point->await() && !(stopping_ && point->is_hopeless())) continue;
    });
  }
  bool reached(const Mark& mark) const override { return !mark || point_of(mark)->is_reached(); }
  double seconds(const Mark& from, const Mark& to) const override {
    return std::chrono::duration<double>(point_of(to)->time() - point_of(from)->time()).count();
  }

 protected:
  void submit(Lane lane, std::function<void()> item) override {
    LaneThread& to = lanes_[static_cast<size_t>(lane)];
    const std::lock_guard lock(to.mutex);
    to.items.push_back(std::move(item));
    to.changed.notify_all();
  }
  void wait_for(const Mark& mark) override {
    while (!point_of(mark)->await()) heed_interrupt();
    const std::lock_guard lock(failure_mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  class Point {
   public:
    explicit Point(bool hopeless = false) : hopeless_(hopeless) {}
    bool is_hopeless() const { return hopeless_; }
    void reach() {
      const std::lock_guard lock(mutex_);
      time_ = Clock::now();
      reached_ = true;
      changed_.notify_all();
    }
    bool is_reached() const {
      const std::lock_guard lock(mutex_);
      return reached_;
    }
    bool await() const {  // at most 20 ms
      std::unique_lock lock(mutex_);
      return changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return reached_; });
    }
    Clock::time_point time() const {
      const std::lock_guard lock(mutex_);
      require(reached_, "a mark that was not reached has no time");
      return time_;
    }

   private:
    const bool hopeless_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool reached_ = false;
    Clock::time_point time_;
  };
  // Marks of all devices of this kind are points, so that a lane can follow one of another device.
  static std::shared_ptr<const Point> point_of(const Mark& mark) { return std::static_pointer_cast<const Point>(mark); }

  struct LaneThread {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> items;
    bool closing = false;
    std::thread thread;
  };

  // A third of the items come late, a few of them by as long as many kernels take.
  static void be_late(std::minstd_rand& random) {
    const auto drawn = random() % 96;
    if (drawn < 30) std::this_thread::sleep_for(std::chrono::microseconds(drawn));
    if (drawn == 31) std::this_thread::sleep_for(std::chrono::microseconds(500));
  }

  void work(LaneThread& lane, uint32_t seed) {
    std::minstd_rand random(seed);
    while (true) {
      std::unique_lock lock(lane.mutex);
      lane.changed.wait(lock, [&] { return lane.closing || !lane.items.empty(); });
      if (lane.items.empty()) return;
      const std::function<void()> item = std::move(lane.items.front());
      lane.items.pop_front();
      lock.unlock();
      be_late(random);
      try {
        item();
      } catch (...) {
        const std::lock_guard failed(failure_mutex_);
        if (!failure_) failure_ = std::current_exception();
      }
    }
  }

  std::atomic<bool> stopping_{false};
  std::mutex failure_mutex_;
  std::exception_ptr failure_;  // of the first item that threw
  std::array<LaneThread, 2> lanes_;
};

}  // namespace mantissa::test
