// Defines errors and exit codes. The library throws Error and never prints or exits; tools catch it and leave with its code.
#pragma once

#include <stdexcept>
#include <string>

#include "mantissa/base/text.h"

namespace mantissa {

// Says what a supervisor may conclude from the exit status of a process.
enum class ExitCode : int {
  ok = 0,
  difference = 1,   // a comparison that was asked for found differences
  usage = 2,        // usage or config error: fix the input, do not retry
  environment = 3,  // device, driver, port, resource limit, locked output folder
  data = 4,         // data or checkpoint invalid
  numerical = 5,    // repeated non-finite steps
  peer_lost = 6,    // another rank was lost or a wait timed out
  storage = 7,      // the last required save could not be made
  internal = 70,    // a bug
  stopped = 75,     // stopped by a signal, a good checkpoint exists: requeue
};

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

template <class... Parts>
[[noreturn]] void fail(ExitCode code, const Parts&... parts) {
  throw Error(code, text(parts...));
}

// Throws Error(code) with the joined parts unless ok. The parts are formatted only on failure.
template <class... Parts>
void require(bool ok, ExitCode code, const Parts&... parts) {
  if (!ok) fail(code, parts...);
}

// Throws for a broken contract between parts of the program (exit code 70).
template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) fail(ExitCode::internal, parts...);
}

}  // namespace mantissa
