// Runs collectives beside the computation, on a thread of its own, in the order of submission. All ranks must submit in the same order, so
// one thread submits; a collective that this thread calls itself begins when the queue is empty.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "mantissa/comm/communicator.h"

namespace mantissa {

// A submitted collective. Copies are handles on the same one; a default one is done. Any thread may wait.
class Work {
 public:
  Work() = default;
  bool done() const;
  void wait() const;  // until it has run; throws what it threw, each time

 private:
  friend class CommQueue;
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    std::exception_ptr error;
  };
  void finish(std::exception_ptr error) const;

  std::shared_ptr<State> state_;
};

class CommQueue {
 public:
  // A group of one has no thread: submit() runs the body. A process has one queue at a time.
  explicit CommQueue(Communicator world);
  // Runs what is left. While an exception unwinds the block, world.stop() ends the collective under way, which peers may never join.
  ~CommQueue();
  CommQueue(const CommQueue&) = delete;
  CommQueue& operator=(const CommQueue&) = delete;

  // After a body has thrown, later ones do not run and their work fails alike, because the ranks are no longer in step.
  Work submit(std::function<void()> body);

 private:
  struct Item {
    std::function<void()> body;
    Work work;
  };
  void run(Item& item);
  void loop();
  void drain();  // returns on the queue's own thread at once

  Communicator world_;
  int unwinding_;
  std::exception_ptr error_;  // of the first that failed; belongs to whoever runs bodies
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Item> items_;
  bool closing_ = false, running_ = false;
  std::thread thread_;
};

}  // namespace mantissa
