// The functions of NCCL that are used. nccl_calls.cpp takes them from the library that this host has; tests/simt/nccl_calls.cpp moves
// messages itself, between ranks that are threads.
#pragma once

#include <nccl.h>

#include <optional>
#include <span>
#include <string>

namespace mantissa {

#define MANTISSA_NCCL_CALLS(X) \
  X(GetVersion)                \
  X(GetUniqueId)               \
  X(CommInitRankConfig)        \
  X(CommFinalize)              \
  X(CommDestroy)               \
  X(CommAbort)                 \
  X(CommGetAsyncError)         \
  X(GroupStart)                \
  X(GroupEnd)                  \
  X(Send)                      \
  X(Recv)                      \
  X(GetErrorString)            \
  X(GetLastError)

struct NcclCalls {
#define MANTISSA_CALL(name) decltype(&nccl##name) name;
  MANTISSA_NCCL_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
};

struct NcclLibrary {
  std::optional<NcclCalls> calls;  // none: it is missing, or lacks one of the functions
  std::string text;                // why; where there are calls, the path
};
NcclLibrary load_nccl();
NcclLibrary open_nccl(std::span<const std::string> paths);  // the first that can be opened

}  // namespace mantissa
