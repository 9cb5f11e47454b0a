// Faults at chosen file operations of this process. The executable's own definitions of the system functions, in fault_injection.cpp, stand
// before the C library's, so the product needs no hooks. Operations count from arming, in the order in which they happen; a kill comes
// instead of the operation, another action before it, an error after doing nothing (close: after closing).
#pragma once

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace mantissa::test {

struct Fault {
  enum Kind { none, kill, error, short_write, other };
  Kind kind = none;
  int at = 0;     // the operation it hits, from 1
  int times = 1;  // it and the next ones
  int error_number = EIO;
  std::string only = {};              // counts operations of this name only; empty: all
  std::string path = {};              // and, of these, open of paths that hold this; empty: all
  bool no_exchange = false;           // the file system cannot swap two names
  std::function<void()> action = {};  // other: happens before the operation, which then succeeds
};

struct FaultState {
  Fault fault;
  int operations = 0;
  bool hit = false;
  bool armed = false;
  std::vector<std::string> calls = {};
  std::vector<std::string> synced = {};  // names of files and folders, as they were at that time
};
inline FaultState fault_state;

inline void arm_fault(const Fault& fault) { fault_state = {.fault = fault, .armed = true}; }
// Returns true if the fault was reached.
inline bool disarm_fault() {
  fault_state.armed = false;
  return fault_state.hit;
}
// The calls since then, in order, of the named operations.
inline std::vector<std::string> calls_since_armed(const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const std::string& call : fault_state.calls)
    if (std::find(names.begin(), names.end(), call) != names.end()) out.push_back(call);
  return out;
}

// True if the fault hits this call; does not return from a kill.
inline bool fault_hits(const char* name, const char* path = "") {
  FaultState& state = fault_state;
  if (!state.armed) return false;
  state.calls.emplace_back(name);
  if (!state.fault.only.empty() && state.fault.only != name) return false;
  if (std::string(path).find(state.fault.path) == std::string::npos) return false;
  ++state.operations;
  if (state.operations < state.fault.at || state.operations - state.fault.at >= state.fault.times) return false;
  state.hit = true;
  if (state.fault.kind == Fault::kill) ::raise(SIGKILL);
  if (state.fault.kind == Fault::other) {
    const auto action = state.fault.action;
    state.armed = false;
    action();
    return false;
  }
  errno = state.fault.error_number;
  return true;
}

// The answer of statvfs for every file system; none: the truth.
inline std::optional<struct statvfs> reported_space;

// The bytes that are free at each call, in place of those; none: the truth.
inline std::function<int64_t()> free_now;

}  // namespace mantissa::test
