// Runs collectives beside the computation, in the order of submission. All ranks must submit in the same order, so one thread submits; a
// collective that this thread calls itself begins when the queue is empty.
//
// Where memory is the host's, they run on a thread of the queue. A device does them in its communication lane, and the queue has no thread:
// submit() asks for all of the body at once.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "mantissa/backend/backend.h"
#include "mantissa/comm/communicator.h"

namespace mantissa {

// A submitted collective. Copies are handles on the same one; a wait for a default one returns. Any thread may wait.
class Work {
 public:
  Work() = default;
  // Returns when it has run; on a device, what its compute lane is asked for from now on comes after it. Throws what it threw, each time.
  void wait() const;

 private:
  friend class CommQueue;
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
    Backend* device = nullptr;
    Backend::Mark mark;          // behind the body, in the lane of the device
    std::function<void()> body;  // keeps what the device may still use
  };
  std::shared_ptr<State> state_;
};

class CommQueue {
 public:
  // A group of one has no thread: submit() runs the body. A process has one queue at a time. `device` has the memory of all collectives;
  // null: the host.
  explicit CommQueue(Communicator world, Backend* device = nullptr);
  // Runs what is left. While an exception unwinds the block, world.stop() ends the collective under way, which peers may never join.
  ~CommQueue();
  CommQueue(const CommQueue&) = delete;
  CommQueue& operator=(const CommQueue&) = delete;

  // After a body has thrown, later ones do not run and their work fails alike, because the ranks are no longer in step.
  Work submit(std::function<void()> body);

 private:
  Work submit_to_device(std::function<void()> body);
  struct Item {
    std::function<void()> body;
    Work work;
  };
  void run(const std::function<void()>& body);
  void run(Item& item);
  void loop();
  void drain();  // returns on the queue's own thread at once

  Communicator world_;
  int unwinding_;
  Backend* device_;                                      // null: the host
  std::vector<std::shared_ptr<Work::State>> on_device_;  // work that the device may not have come to
  std::exception_ptr error_;                             // error of the first body that failed; belongs to whoever runs bodies
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Item> items_;
  bool closing_ = false, running_ = false;
  std::thread thread_;
};

}  // namespace mantissa
