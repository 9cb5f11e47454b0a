// The functions of cuBLASLt that are used. chip/cublaslt_calls.cpp takes them from the library that this host has;
// tests/simt/cublaslt_calls.cpp multiplies itself.
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
  X(MatrixLayoutCreate)            \
  X(MatrixLayoutDestroy)           \
  X(MatrixLayoutSetAttribute)      \
  X(MatmulPreferenceCreate)        \
  X(MatmulPreferenceDestroy)       \
  X(MatmulPreferenceSetAttribute)  \
  X(MatmulAlgoGetHeuristic)        \
  X(MatmulAlgoCheck)               \
  X(Matmul)

struct CublasLtCalls {
#define MANTISSA_CALL(name) decltype(&cublasLt##name) name;
  MANTISSA_CUBLASLT_CALLS(MANTISSA_CALL)
#undef MANTISSA_CALL
  // Null in libraries that lack it. Headers before 13.2 do, too. The arrays are in device memory, with an element for each group.
  cublasStatus_t (*GroupedMatrixLayoutCreate)(cublasLtMatrixLayout_t* layout, cudaDataType type, int groups, const void* rows,
                                              const void* columns, const void* leading_dimensions);
};

// None where the library is missing, of another major version than its header, or without one of the functions; the log says which.
std::optional<CublasLtCalls> load_cublaslt();

}  // namespace mantissa::gpu
