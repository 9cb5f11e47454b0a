#include "comm/comm_queue.h"

#include <utility>

#include "comm/collective.h"
#include "mantissa/base/log.h"
#include "mantissa/base/trace.h"

namespace mantissa {

void Work::wait() const {
  if (!state_) return;
  const TraceSpan span(Track::wait, "wait");
  if (state_->device) {
    const std::lock_guard lock(state_->mutex);
    if (state_->error) std::rethrow_exception(state_->error);
    DeviceWait wait(*state_->device);
    state_->device->follow(state_->mark);
    wait.end();
    if (current_lane() != Lane::compute) return;
    state_->done = true;
    state_->body = nullptr;  // now that the compute lane comes after it, what the body held may go back to that lane
    return;
  }
  const CommunicationTime time;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->done; });
  if (state_->error) std::rethrow_exception(state_->error);
}

CommQueue::CommQueue(Communicator world, Backend* device)
    : world_(std::move(world)),
      unwinding_(std::uncaught_exceptions()),
      device_(device && !device->host_memory() && world_.size() > 1 ? device : nullptr) {
  if (device_) Session::watch(world_.group_->session, *device_);
  if (world_.size() == 1 || device_) return;
  std::function<void()>& before_call = world_.group_->session->before_call;
  require(!before_call, "this process has a CommQueue already");
  before_call = [this] { drain(); };
  thread_ = std::thread([this] { loop(); });
}

CommQueue::~CommQueue() {
  if (std::uncaught_exceptions() > unwinding_) world_.stop();
  try {
    for (const auto& state : on_device_) device_->follow(state->mark);
  } catch (const Error& error) {  // the device has failed: nothing runs there any more, and the next wait for it throws
    log_warning("compute does not wait for the communication lane, because the device failed: ", error.what());
  }
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_one();
  }
  thread_.join();
  world_.group_->session->before_call = nullptr;
}

// One order for all groups: what the lanes of all ranks do in one order cannot wait for each other.
Work CommQueue::submit_to_device(std::function<void()> body) {
  std::erase_if(on_device_, [](const auto& state) {
    const std::lock_guard lock(state->mutex);
    return state->done || state->device->reached(state->mark);
  });
  Work work;
  work.state_ = std::make_shared<Work::State>();
  Work::State& state = *work.state_;
  state.device = device_;
  DeviceWait wait(*device_);  // a link may keep the host from asking for kernels
  const Backend::Mark asked = device_->mark();
  {
    const LaneScope lane(Lane::communication);
    device_->follow(asked);
    run(body);
    state.error = error_;
    state.body = std::move(body);
    state.mark = device_->mark();
  }
  wait.end();
  on_device_.push_back(work.state_);
  return work;
}

Work CommQueue::submit(std::function<void()> body) {
  if (device_) return submit_to_device(std::move(body));
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

void CommQueue::run(const std::function<void()>& body) {
  if (error_) return;
  try {
    body();
  } catch (...) {
    error_ = std::current_exception();
  }
}

void CommQueue::run(Item& item) {
  run(item.body);
  item.body = nullptr;  // frees the memory that it holds before the work is done
  Work::State& state = *item.work.state_;
  const std::lock_guard lock(state.mutex);
  state.error = error_;
  state.done = true;
  state.changed.notify_all();
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
