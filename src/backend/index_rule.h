// Which indices a kernel takes, and what is said of another one: on a CPU before the kernel writes, on a device when somebody waits for it.
#pragma once

#include <cstdint>

#include "mantissa/base/error.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

struct IndexRule {
  ExitCode code;                 // of the error
  const char *kernel, *operand;  // literals
  int64_t limit;
  bool negative = false;  // negative ones are allowed, as of ignored targets

  static IndexRule targets(const char* kernel, int64_t vocab) { return {ExitCode::data, kernel, "targets", vocab, true}; }
  MANTISSA_HOST_DEVICE bool allows(int64_t value) const { return value < limit && (negative || value >= 0); }
  [[noreturn]] void refuse(int64_t index, int64_t value) const;  // throws Error(code)
};

}  // namespace mantissa
