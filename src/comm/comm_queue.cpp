#include "mantissa/comm/comm_queue.h"

#include <utility>

#include "comm/collective.h"
#include "mantissa/base/trace.h"

namespace mantissa {

bool Work::done() const {
  if (!state_) return true;
  const std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Work::wait() const {
  if (!state_) return;
  const CommunicationTime time;
  const TraceSpan span(Track::wait, "wait");
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

void Work::finish(std::exception_ptr error) const {
  const std::lock_guard lock(state_->mutex);
  state_->error = std::move(error);
  state_->done = true;
  state_->changed.notify_all();
}

CommQueue::CommQueue(Communicator world) : world_(std::move(world)), unwinding_(std::uncaught_exceptions()) {
  if (world_.size() == 1) return;
  std::function<void()>& before_call = world_.group_->session->before_call;
  require(!before_call, "a second CommQueue of this process");
  before_call = [this] { drain(); };
  thread_ = std::thread([this] { loop(); });
}

CommQueue::~CommQueue() {
  if (!thread_.joinable()) return;
  if (std::uncaught_exceptions() > unwinding_) world_.stop();
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_one();
  }
  thread_.join();
  world_.group_->session->before_call = nullptr;
}

Work CommQueue::submit(std::function<void()> body) {
  Item item{.body = std::move(body), .work = {}};
  item.work.state_ = std::make_shared<Work::State>();
  Work work = item.work;
  if (!thread_.joinable()) {
    run(item);
    return work;
  }
  const std::lock_guard lock(mutex_);
  items_.push_back(std::move(item));
  changed_.notify_one();
  return work;
}

void CommQueue::run(Item& item) {
  if (!error_) {
    try {
      item.body();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  item.body = nullptr;  // what it holds is free before the work is done
  item.work.finish(error_);
}

void CommQueue::loop() {
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return closing_ || !items_.empty(); });
    if (items_.empty()) return;
    Item item = std::move(items_.front());
    items_.pop_front();
    running_ = true;
    lock.unlock();
    run(item);
    lock.lock();
    running_ = false;
    idle_.notify_all();
  }
}

void CommQueue::drain() {
  if (std::this_thread::get_id() == thread_.get_id()) return;
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return items_.empty() && !running_; });
}

}  // namespace mantissa
