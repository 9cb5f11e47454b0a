// Traces the steps of training.trace and writes the file of each rank.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "mantissa/config/run_config.h"

namespace mantissa {

// Ends tracing and returns the spans (base/trace.h) as a JSON object in Chrome's trace event format, for chrome://tracing or
// ui.perfetto.dev: microseconds of the monotonic clock, so that ranks of one host line up; the process is the rank.
std::string finish_trace(int rank);

class RunTrace {
 public:
  RunTrace(const RunConfig& config, int rank) : config_(config), rank_(rank) {}
  ~RunTrace() { write(); }  // if the run ends before
  RunTrace(const RunTrace&) = delete;
  RunTrace& operator=(const RunTrace&) = delete;

  // A trace lasts until the step after its last begins; settle() then waits for what is still under way, which belongs to it.
  void begin_step(int64_t number, const std::function<void()>& settle);

 private:
  void write() const noexcept;

  const RunConfig& config_;
  int rank_;
};

}  // namespace mantissa
