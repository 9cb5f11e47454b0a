// Makes the library of GEMMs over the executor (cublaslt_calls.cpp) fail.
#pragma once

#include <atomic>

namespace mantissa::simt {

std::atomic<int>& status_of_gemms();  // a cublasStatus_t; 0: they succeed

}  // namespace mantissa::simt
