// Writes log lines of the library. Nothing is written until a tool opens the log: a library user sees no output by default.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "mantissa/base/error.h"

namespace mantissa {

enum class LogLevel { debug, info, warning, error, off };

struct LogOptions {
  LogLevel level = LogLevel::info;
  bool console = true;                       // standard error
  LogLevel console_level = LogLevel::debug;  // least severe message there, if above `level`
  std::string file;                          // empty: none; opened for appending
  std::string who = {};                      // before every message, "rank 3: "
};

// Replaces the sinks. A log without a file keeps its newest 1,000 records; opening it again with a file writes them there first, because
// the folder of a run is made only once nothing can refuse the run any more. Throws Error(environment) if the file cannot be opened. A
// later write that fails is counted, never thrown.
void open_log(const LogOptions& options);
void close_log();
int64_t dropped_log_lines();  // by all logs of this process
// Control characters in the message are escaped, so that a name from a file cannot forge a line.
void write_log(LogLevel level, const std::string& message);

template <class... Parts>
void log_info(const Parts&... parts) {
  write_log(LogLevel::info, text(parts...));
}
template <class... Parts>
void log_warning(const Parts&... parts) {
  write_log(LogLevel::warning, text(parts...));
}
template <class... Parts>
void log_error(const Parts&... parts) {
  write_log(LogLevel::error, text(parts...));
}

// Writes to a descriptor whose reader may not read: a pipe that nobody empties, a terminal that was stopped. Writing never waits for the
// reader; unread output is kept up to a limit, and then dropped and counted.
class UnblockedOutput {
 public:
  explicit UnblockedOutput(int fd);
  ~UnblockedOutput();  // finish()
  UnblockedOutput(const UnblockedOutput&) = delete;
  UnblockedOutput& operator=(const UnblockedOutput&) = delete;

  // Writes whole lines. They are dropped if the reader is gone, the disk is full, a MiB of earlier lines waits, or after give_up(); never
  // for their size, if nothing waits.
  void write(std::string_view lines);
  void flush();    // writes what goes at once
  void finish();   // writes all of it, as long as the reader takes some every two seconds; the rest is dropped
  void give_up();  // drops what waits, and all lines from now on
  bool waiting() const { return !waiting_.empty(); }
  double seconds_waiting() const;                    // since the reader last took some, if something waits; else 0
  int fd() const { return own_ >= 0 ? own_ : fd_; }  // to poll for POLLOUT while something waits
  int64_t dropped_lines() const { return dropped_; }
  int error() const { return error_; }  // errno of the latest write that failed; 0: none has

 private:
  using Clock = std::chrono::steady_clock;

  void drop();

  int fd_, own_ = -1;
  std::string waiting_;
  Clock::time_point taken_at_;  // or when what waits began to wait
  int64_t dropped_ = 0;
  int error_ = 0;
  bool given_up_ = false;
};

}  // namespace mantissa
