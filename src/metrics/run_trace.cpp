#include "metrics/run_trace.h"

#include <array>
#include <filesystem>
#include <iomanip>
#include <sstream>

#include "base/file.h"
#include "json/json_fields.h"
#include "mantissa/base/log.h"
#include "mantissa/base/trace.h"

namespace mantissa {
namespace {

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

double microseconds(std::chrono::nanoseconds time) { return std::chrono::duration<double, std::micro>(time).count(); }

}  // namespace

std::string finish_trace(int rank) {
  static constexpr std::array kTracks{"compute", "communication", "wait"};
  std::string out = "{\"traceEvents\":[";
  for (const RecordedSpan& span : end_trace()) {
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

void RunTrace::begin_step(int64_t number, const std::function<void()>& settle) {
  if (!config_.training.trace) return;
  const std::vector<int64_t>& steps = config_.training.trace->steps;
  if (number > steps[1]) {
    if (tracing()) settle();
    return write();
  }
  if (number >= steps[0]) start_trace();
}

void RunTrace::write() const noexcept {
  if (!tracing()) return;
  try {
    std::ostringstream name;
    name << "trace-rank" << std::setw(5) << std::setfill('0') << rank_ << ".json";
    write_file_atomically(std::filesystem::path(config_.logging.dir) / name.str(), finish_trace(rank_));
  } catch (const std::exception& error) {  // a trace is not worth the run
    log_warning("training.trace: ", error.what());
  }
}

}  // namespace mantissa
