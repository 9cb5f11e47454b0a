// A time line of this process: spans of what its threads and its device do, kept while tracing is on and handed to whoever asked for them.
// RunTrace (metrics/run_trace.h) writes them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mantissa {

// Kinds of spans, from the outermost to the innermost: a step, a pass of it (forward, backward, optimizer, ...), a module, one of the GEMMs
// of a module (fprop, dgrad, wgrad), a kernel; an exchange between ranks, and a wait for one that runs beside the computation.
enum class Track : uint8_t { step, pass, module, gemm, kernel, exchange, wait };

struct RecordedSpan {
  std::string name;
  Track track;
  int thread;                                    // its number in the order of first spans; of a device, the lane
  int64_t number = -1;                           // number of the step or the micro batch; -1: none
  int64_t bytes = 0;                             // size of a kernel's operands, or what this rank sent in an exchange
  double flops = 0.0;                            // FLOPs of a kernel
  std::string operands{};                        // names, types and shapes of a kernel's operands
  std::chrono::nanoseconds begin{}, duration{};  // on the monotonic clock of the host
  std::shared_ptr<const void> from{}, to{};      // marks of a TraceClock, instead of the two
};

// Times spans of a device whose kernels end later than their calls. lane() and mark() are called by any thread, the others by one at a
// time.
class TraceClock {
 public:
  TraceClock() = default;
  virtual ~TraceClock() = default;
  TraceClock(const TraceClock&) = delete;
  TraceClock& operator=(const TraceClock&) = delete;
  virtual int lane() const = 0;                    // the lane of this thread
  virtual std::shared_ptr<const void> mark() = 0;  // in that lane, behind all that it was asked for
  virtual bool reached(const std::shared_ptr<const void>& mark) const = 0;
  virtual std::chrono::nanoseconds time(const std::shared_ptr<const void>& mark) = 0;  // time of one that is reached, on the host's clock
};

// Takes spans in the order of their ends. It is called by any thread, one at a time, and must neither throw nor begin a span.
using TraceSink = std::function<void(const std::vector<RecordedSpan>&)>;

// Once so many spans are kept, the sink gets those that the device has come to. Without a sink all stay until end_trace().
constexpr size_t kBufferedSpans = 1 << 16;

// Starts tracing. Returns false, and changes nothing, if this process traces already. The clock, if any, must outlive end_trace().
bool start_trace(TraceSink sink = {}, TraceClock* clock = nullptr);
bool tracing();
// Hands all spans to the sink that have ended, as far as the device has come to their ends.
void flush_trace();
// Ends tracing, flushes, and returns what the sink did not get. Spans that the device has not come to are forgotten.
std::vector<RecordedSpan> end_trace();

// Callbacks of a profiler, called whether this process traces or not: where a span begins and, on the same thread, where it ends.
struct SpanHook {
  void (*begin)(const char* name);
  void (*end)();
};
void set_span_hook(const SpanHook* hook);  // null: nobody; it must outlive the process's spans
const SpanHook* span_hook();

// Records from construction to the end of the block. Costs a look at two flags while nobody traces.
class TraceSpan {
 public:
  TraceSpan(Track track, const char* name, int64_t number = -1) : hook_(span_hook()) {
    if (tracing()) open(track, name, number);
    if (hook_) hook_->begin(name);
  }
  ~TraceSpan() {
    if (hook_) hook_->end();
    if (span_) keep();
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

  // Ends the span before the end of the block, so that its caller may describe it; null while nobody traces.
  RecordedSpan* ended() const {
    if (span_) close();
    return span_.get();
  }

 private:
  void open(Track track, const char* name, int64_t number);
  void close() const noexcept;
  void keep() noexcept;

  const SpanHook* hook_;
  std::unique_ptr<RecordedSpan> span_;
};

}  // namespace mantissa
