#include "mantissa/base/trace.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <mutex>
#include <new>
#include <utility>

namespace mantissa {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> on{false};
std::atomic<TraceClock*> clock_of_process{nullptr};
std::atomic<int> thread_of_clock{-1};  // submits to the device; others compute on the host
std::atomic<const SpanHook*> hook_of_process{nullptr};
std::mutex spans_mutex;
TraceSink sink_of_process;
std::vector<RecordedSpan> spans;

int this_thread() {
  static std::atomic<int> threads{0};
  thread_local const int number = threads++;
  return number;
}

bool has_come(const RecordedSpan& span, const TraceClock* clock) {
  return !span.to || (clock != nullptr && clock->reached(span.from) && clock->reached(span.to));
}

// Numbers of lanes are below those of threads that compute on the host beside a device.
constexpr int kLanes = 16;

// Replaces the marks of spans that the device has come to by times. Returns the first span that it has not come to.
std::vector<RecordedSpan>::iterator resolve() {
  TraceClock* const clock = clock_of_process;
  auto span = spans.begin();
  for (; span != spans.end() && has_come(*span, clock); ++span) {
    if (!span->to) continue;
    span->begin = clock->time(span->from);
    span->duration = std::max(clock->time(span->to) - span->begin, std::chrono::nanoseconds(0));
    span->from = nullptr, span->to = nullptr;
  }
  return span;
}

void flush() {
  if (!sink_of_process) return;
  const auto end = resolve();
  if (end == spans.begin()) return;
  const std::vector<RecordedSpan> ready(std::make_move_iterator(spans.begin()), std::make_move_iterator(end));
  spans.erase(spans.begin(), end);
  sink_of_process(ready);
}

}  // namespace

bool start_trace(TraceSink sink, TraceClock* clock) {
  const std::lock_guard lock(spans_mutex);
  if (on) return false;
  sink_of_process = std::move(sink);
  clock_of_process = clock;
  thread_of_clock = this_thread();
  on = true;
  return true;
}

bool tracing() { return on.load(std::memory_order_relaxed); }
void set_span_hook(const SpanHook* hook) { hook_of_process = hook; }
const SpanHook* span_hook() { return hook_of_process.load(std::memory_order_acquire); }

void TraceSpan::open(Track track, const char* name, int64_t number) {
  try {
    TraceClock* const clock = clock_of_process;
    const bool in_lane = clock != nullptr && this_thread() == thread_of_clock;
    const int thread = in_lane ? clock->lane() : this_thread() + (clock != nullptr ? kLanes : 0);
    auto span = std::make_unique<RecordedSpan>(RecordedSpan{.name = name, .track = track, .thread = thread, .number = number});
    if (in_lane) span->from = clock->mark();
    span->begin = Clock::now().time_since_epoch();
    span_ = std::move(span);
  } catch (const std::exception&) {  // as in keep()
  }
}

// A mark that cannot be made leaves the host's times.
void TraceSpan::close() const noexcept {
  if (span_->duration.count() > 0 || span_->to) return;
  try {
    TraceClock* const clock = clock_of_process;
    if (span_->from && clock != nullptr) span_->to = clock->mark();
  } catch (const std::exception&) {
    span_->from = nullptr;
  }
  span_->duration = std::max<std::chrono::nanoseconds>(Clock::now().time_since_epoch() - span_->begin, std::chrono::nanoseconds(1));
}

void TraceSpan::keep() noexcept {
  close();
  try {
    const std::lock_guard lock(spans_mutex);
    if (!on) return;
    spans.push_back(std::move(*span_));
    if (spans.size() >= kBufferedSpans) flush();
  } catch (const std::exception&) {  // a hole in the time line is no reason to end a run
  }
}

void flush_trace() {
  const std::lock_guard lock(spans_mutex);
  flush();
}

std::vector<RecordedSpan> end_trace() {
  const std::lock_guard lock(spans_mutex);
  on = false;
  flush();
  resolve();
  clock_of_process = nullptr;
  sink_of_process = nullptr;
  std::erase_if(spans, [](const RecordedSpan& span) { return span.to != nullptr; });
  return std::exchange(spans, {});
}

}  // namespace mantissa
