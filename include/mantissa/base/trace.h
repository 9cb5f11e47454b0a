// A time line of this process: spans of what its threads do, kept while tracing is on. finish_trace() (metrics/run_trace.h) writes them.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace mantissa {

enum class Track { compute, communication, wait };

// Starts tracing, or continues it.
void start_trace();
bool tracing();

struct RecordedSpan {
  const char* name;
  Track track;
  int thread;  // its number in the order of first spans
  int64_t bytes;
  std::chrono::nanoseconds begin, duration;  // on the monotonic clock
};

// Ends tracing and forgets the spans, which it returns in the order of their ends.
std::vector<RecordedSpan> end_trace();

// Callbacks of a profiler, called whether this process traces or not: where a span begins and, on the same thread, where it ends.
struct SpanHook {
  void (*begin)(const char* name);
  void (*end)();
};
void set_span_hook(const SpanHook* hook);  // null: nobody; it must outlive the process's spans
const SpanHook* span_hook();

// Records from construction to the end of the block. `name` is a literal. Costs a look at two flags while nobody traces.
class TraceSpan {
 public:
  TraceSpan(Track track, const char* name, int64_t bytes = 0)
      : name_(tracing() ? name : nullptr), track_(track), bytes_(bytes), hook_(span_hook()) {
    if (name_) begin_ = Clock::now();
    if (hook_) hook_->begin(name);
  }
  ~TraceSpan() {
    if (hook_) hook_->end();
    if (name_) keep();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  void keep() const noexcept;

  const char* name_;
  Track track_;
  int64_t bytes_;
  const SpanHook* hook_;
  Clock::time_point begin_;
};

}  // namespace mantissa
