// Collectives beside the computation: a thread that runs what it is given, one after the other, in the order of submission. That order is
// the program's on every rank, so one thread submits; a collective that this thread calls itself begins when the queue has no work.
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

// Something that was submitted. Copies are handles on the same; a default one is done. Any thread may wait.
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
  // For a group of one there is no thread: submit() runs the body. A process has one queue at a time.
  explicit CommQueue(Communicator world);
  // Runs what is left. When an exception unwinds the block, world.stop() ends what is under way: peers may never come to it.
  ~CommQueue();
  CommQueue(const CommQueue&) = delete;
  CommQueue& operator=(const CommQueue&) = delete;

  // Once a body has thrown, later ones do not run and their work fails alike: the ranks are no longer in step.
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
