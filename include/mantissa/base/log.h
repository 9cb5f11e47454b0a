// Writes log lines of the library. Nothing is written until a tool opens the log: a library user sees no output by default.
#pragma once

#include <cstdint>
#include <string>

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
void log_debug(const Parts&... parts) {
  write_log(LogLevel::debug, text(parts...));
}
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

}  // namespace mantissa
