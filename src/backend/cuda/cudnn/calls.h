// The functions of cuDNN that are used. chip/cudnn_calls.cpp takes them from the library that this host has; tests/simt/cudnn_calls.cpp
// computes itself what graphs say.
#pragma once

#include <cudnn_graph.h>

namespace mantissa::gpu {

#define MANTISSA_CUDNN_CALLS(X) \
  X(Create)                     \
  X(Destroy)                    \
  X(SetStream)                  \
  X(GetVersion)                 \
  X(GetLastErrorString)         \
  X(BackendCreateDescriptor)    \
  X(BackendDestroyDescriptor)   \
  X(BackendFinalize)            \
  X(BackendSetAttribute)        \
  X(BackendGetAttribute)        \
  X(BackendExecute)

struct CudnnCalls {
#define MANTISSA_CALL(name) decltype(&cudnn##name) name;
  MANTISSA_CUDNN_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
};

// Throws Error(environment) where the library is missing, of another major version than its header, or without one of the functions.
CudnnCalls load_cudnn();

}  // namespace mantissa::gpu
