// Measures what this machine can do at best, in the same run as a workload: performance is reported as a ratio to one of these.
#pragma once

#include <memory>
#include <string>

#include "mantissa/backend/backend.h"

namespace mantissa {

// Multiplies two square matrices of normal data: on a CPU by oneDNN with its own threading; on a GPU by the backend's GEMM, and run() may
// return before the GPU has done it. Where the CPU has no bf16 dot product, the fp32 GEMM stands for bf16 as well, and dtype() says so.
class GemmCeiling {
 public:
  static int64_t usual_rows(const Backend& device);  // 2048 on a CPU, 8192 on a GPU
  // Throws Error(environment) on a GPU without cuBLASLt, because our own kernels are below the ceiling.
  GemmCeiling(Backend& device, Dtype dtype, int64_t rows);
  Dtype dtype() const { return a_.dtype(); }
  double flops() const;  // FLOPs of one run
  void run();

 private:
  struct Library;

  Backend& device_;
  Tensor a_, b_, out_;
  std::shared_ptr<const Library> library_;  // a primitive of oneDNN; null on a GPU
};

// Copies `bytes` bytes: on a CPU by threads, on a GPU by the backend's Convert, and run() may return before the GPU has done it.
class CopyCeiling {
 public:
  CopyCeiling(Backend& device, int64_t bytes);
  double bytes() const { return 2.0 * static_cast<double>(from_.bytes()); }  // read + written by one run
  void run();

 private:
  Backend& device_;
  Tensor from_, to_;
};

// Names the instruction set of GEMMs: "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16".
std::string gemm_instruction_set();

// Returns how many rows the backend "cpu" computes for a group of so many.
int64_t grouped_rows(int64_t rows);

}  // namespace mantissa
