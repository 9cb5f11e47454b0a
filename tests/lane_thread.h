// A lane of a device of the tests: a thread that waits at random before it does the next thing it was asked for.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>

#include "mantissa/base/error.h"

namespace mantissa::test {

// A point in a lane, after all that it was asked for until then.
class LanePoint {
 public:
  explicit LanePoint(bool hopeless = false) : hopeless_(hopeless) {}
  bool is_hopeless() const { return hopeless_; }  // no lane reaches it
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
  double seconds_until(const LanePoint& later) const { return std::chrono::duration<double>(later.time() - time()).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point time() const {
    const std::lock_guard lock(mutex_);
    require(reached_, "a mark that was not reached has no time");
    return time_;
  }

  const bool hopeless_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point time_;
};

class LaneThread {
 public:
  explicit LaneThread(uint32_t seed) : thread_([this, seed] { work(seed); }) {}
  ~LaneThread() { end(); }
  LaneThread(const LaneThread&) = delete;
  LaneThread& operator=(const LaneThread&) = delete;

  void submit(std::function<void()> item) {
    const std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    changed_.notify_all();
  }
  std::shared_ptr<const LanePoint> mark() {
    auto point = std::make_shared<LanePoint>();
    submit([point] { point->reach(); });
    return point;
  }
  void follow(std::shared_ptr<const LanePoint> point) {
    submit([this, point = std::move(point)] {
      while (!point->await() && !(point->is_hopeless() && closing())) continue;
    });
  }
  void rethrow() {  // throws the error of the first item that threw
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  // Returns when everything is done; later items are not.
  void end() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  bool closing() {
    const std::lock_guard lock(mutex_);
    return closing_;
  }
  // A third of the items come late, a few of them by as long as many kernels take.
  static void be_late(std::minstd_rand& random) {
    const auto drawn = random() % 96;
    if (drawn < 30) std::this_thread::sleep_for(std::chrono::microseconds(drawn));
    if (drawn == 31) std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
  void work(uint32_t seed) {
    std::minstd_rand random(seed);
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || !items_.empty(); });
      if (items_.empty()) return;
      const std::function<void()> item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      be_late(random);
      try {
        item();
      } catch (...) {
        lock.lock();
        if (!failure_) failure_ = std::current_exception();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> items_;
  std::exception_ptr failure_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace mantissa::test
