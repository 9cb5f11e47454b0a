// The functions of cuBLASLt that are used. load.cpp takes them from the library that this host has; tests/simt/cublaslt_calls.cpp computes
// the products itself.
#pragma once

#include <cublasLt.h>

#include <optional>

namespace mantissa::gpu {

#define MANTISSA_CUBLASLT_CALLS(X) \
  X(Create)                        \
  X(Destroy)                       \
  X(GetVersion)                    \
  X(MatmulDescCreate)              \
  X(MatmulDescDestroy)             \
  X(MatmulDescSetAttribute)        \
  X(MatmulDescGetAttribute)        \
  X(MatrixLayoutCreate)            \
  X(MatrixLayoutDestroy)           \
  X(MatrixLayoutGetAttribute)      \
  X(MatmulPreferenceCreate)        \
  X(MatmulPreferenceDestroy)       \
  X(MatmulPreferenceSetAttribute)  \
  X(MatmulPreferenceGetAttribute)  \
  X(MatmulAlgoGetHeuristic)        \
  X(Matmul)

struct CublasLtCalls {
#define MANTISSA_CALL(name) decltype(&cublasLt##name) name;
  MANTISSA_CUBLASLT_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
};

// None where the library is missing, or of another major version than its header.
std::optional<CublasLtCalls> load_cublaslt();

}  // namespace mantissa::gpu
