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
  std::chrono::nanoseconds begin, duration;  // of the monotonic clock
};

// Ends that and forgets the spans, which it returns in the order of their ends.
std::vector<RecordedSpan> end_trace();

// Records from construction to the end of the block. `name` is a literal. Costs a look at one flag while nobody traces.
class TraceSpan {
 public:
  TraceSpan(Track track, const char* name, int64_t bytes = 0) : name_(tracing() ? name : nullptr), track_(track), bytes_(bytes) {
    if (name_) begin_ = Clock::now();
  }
  ~TraceSpan() {
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
  Clock::time_point begin_;
};

}  // namespace mantissa
