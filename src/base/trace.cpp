#include "mantissa/base/trace.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "mantissa/base/json_fields.h"

namespace mantissa {
namespace {

struct Span {
  const char* name;
  Track track;
  int thread;
  int64_t bytes;
  std::chrono::nanoseconds begin, duration;
};

std::atomic<bool> on{false};
std::mutex mutex;
std::vector<Span> spans;

int this_thread() {
  static std::atomic<int> threads{0};
  thread_local const int number = threads++;
  return number;
}

// An event of the format: name, category, phase X (complete), begin and duration in microseconds.
struct Event {
  std::string name, cat, ph = "X";
  double ts = 0.0, dur = 0.0;
  int pid = 0, tid = 0;
  struct Arguments {
    int64_t bytes = 0;
    void fields(auto& v) { v("bytes", bytes); }
  } args = {};

  void fields(auto& v) {
    v("name", name);
    v("cat", cat);
    v("ph", ph);
    v("ts", ts);
    v("dur", dur);
    v("pid", pid);
    v("tid", tid);
    v("args", args);
  }
};

}  // namespace

void start_trace() { on = true; }
bool tracing() { return on.load(std::memory_order_relaxed); }

void TraceSpan::keep() const noexcept {
  try {
    const auto end = Clock::now();
    const Span span{name_, track_, this_thread(), bytes_, begin_.time_since_epoch(), end - begin_};
    const std::lock_guard lock(mutex);
    spans.push_back(span);
  } catch (const std::bad_alloc&) {  // a hole in the time line is no reason to end a run
  }
}

std::string finish_trace(int rank) {
  static constexpr std::array kTracks{"compute", "communication", "wait"};
  on = false;
  const std::lock_guard lock(mutex);
  std::string out = "{\"traceEvents\":[";
  const auto microseconds = [](auto time) { return std::chrono::duration<double, std::micro>(time).count(); };
  for (const Span& span : std::exchange(spans, {})) {
    if (out.back() != '[') out += ",\n";
    out += json_text(Event{.name = span.name,
                           .cat = kTracks[static_cast<size_t>(span.track)],
                           .ts = microseconds(span.begin),
                           .dur = microseconds(span.duration),
                           .pid = rank,
                           .tid = span.thread,
                           .args = {.bytes = span.bytes}});
  }
  return out + "],\"displayTimeUnit\":\"ms\"}\n";
}

}  // namespace mantissa
