#include "mantissa/base/trace.h"

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace mantissa {
namespace {

std::atomic<bool> on{false};
std::atomic<const SpanHook*> hook_of_process{nullptr};
std::mutex spans_mutex;
std::vector<RecordedSpan> spans;

int this_thread() {
  static std::atomic<int> threads{0};
  thread_local const int number = threads++;
  return number;
}

}  // namespace

void start_trace() { on = true; }
bool tracing() { return on.load(std::memory_order_relaxed); }
void set_span_hook(const SpanHook* hook) { hook_of_process = hook; }
const SpanHook* span_hook() { return hook_of_process.load(std::memory_order_acquire); }

void TraceSpan::keep() const noexcept {
  try {
    const auto end = Clock::now();
    const RecordedSpan span{name_, track_, this_thread(), bytes_, begin_.time_since_epoch(), end - begin_};
    const std::lock_guard lock(spans_mutex);
    spans.push_back(span);
  } catch (const std::bad_alloc&) {  // a hole in the time line is no reason to end a run
  }
}

std::vector<RecordedSpan> end_trace() {
  on = false;
  const std::lock_guard lock(spans_mutex);
  return std::exchange(spans, {});
}

}  // namespace mantissa
