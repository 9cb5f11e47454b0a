// Traces the steps of training.trace into the run folder, for chrome://tracing, ui.perfetto.dev and mantissa trace.
//
// trace.json is a list of Chrome's trace events, one a line, those of each rank in a row: `[`, events, `]`. The process is the rank, times
// are microseconds of the monotonic clock, so that ranks of one host line up. Events of a rank:
//
//   M mantissa      the first: version of this form, ranks, first step that is traced, last that is to be, attempt (when tracing began, as
//                   rank 0 says: microseconds since 1970, the same for all ranks), device ("cpu", ...), host
//   M process_name, thread_name
//   X               a span: cat is one of kTrackNames, tid the thread, of a device the lane; args, as far as they apply, number (of
//                   the step or the micro batch), bytes, flops and operands. What a run does behind a step is a span of cat step,
//                   too, with the number of that step: evaluation, samples, save
//   M end           the last: how many spans there are
//
// Each rank writes its part, trace-rank00000.json, of the same form, while the run goes on. Rank 0 joins the parts when all are complete.
// A killed run leaves parts without an end, which lack the spans of about a step. What an earlier attempt of the run traced stays beside,
// under names with its first step: trace-from-00005.json, trace-from-00005-rank00000.json.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "mantissa/base/trace.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "metrics/run_folder.h"

namespace mantissa {

inline constexpr std::array kTrackNames{"step", "pass", "module", "gemm", "kernel", "exchange", "wait"};  // by Track

inline constexpr int kTraceVersion = 1;

// Returns the path of a rank's part.
std::filesystem::path trace_part(const std::filesystem::path& folder, int rank);
std::filesystem::path joined_trace(const std::filesystem::path& folder);

// Writes a part. Failures to write are warned of, and counted by nobody.
class TraceFile {
 public:
  struct About {
    int rank = 0, ranks = 1;
    int64_t first = 0, last = 0, attempt = 0;
    std::string device;
  };
  TraceFile(const std::filesystem::path& folder, const About& about);
  void write(const std::vector<RecordedSpan>& spans);
  void end();

 private:
  AppendFile file_;
  int rank_;
  int64_t spans_ = 0;
  std::vector<int> threads_;  // that are named
};

// Joins the parts of so many ranks, which are complete, to trace.json and removes them. Throws Error(storage), and Error(data) if a part is
// missing or incomplete; then all parts stay.
void join_trace(const std::filesystem::path& folder, int ranks);

class RunTrace {
 public:
  RunTrace(const RunConfig& config, Backend& device, const Communicator& world);
  ~RunTrace();  // ends the part
  RunTrace(const RunTrace&) = delete;
  RunTrace& operator=(const RunTrace&) = delete;

  // All ranks call this before each step. A trace lasts until the step after its last begins; settle() waits, then and before its first,
  // for what is still under way of the step before.
  void begin_step(int64_t number, const std::function<void()>& settle);
  // Ends a trace that is not over. All ranks call it at the end of the run.
  void end(const std::function<void()>& settle);

 private:
  class DeviceClock;
  enum class State { before, tracing, over };
  void start(int64_t first);
  void end_part() noexcept;

  const RunConfig& config_;
  Backend& device_;
  const Communicator& world_;
  State state_ = State::before;
  std::unique_ptr<DeviceClock> clock_;
  std::unique_ptr<TraceFile> file_;  // null: this process traces for another rank, or the file could not be made
};

}  // namespace mantissa
