// Measures what this machine can do at best, in the same run as a workload: performance is reported as a ratio to one of these.
#pragma once

#include <string>

#include "mantissa/backend/backend.h"

namespace mantissa {

class Matmul;

// Multiplies two square matrices of normal data: on a CPU by oneDNN with its own threading, of 2048 rows; on another device by the
// backend's GEMM, of 8192 rows, which comes to its end later. Where the CPU has no bf16 dot product, the fp32 GEMM stands for bf16 as well,
// and dtype() says so.
class GemmCeiling {
 public:
  GemmCeiling(Backend& device, Dtype dtype, int64_t rows = 0);  // 0: as said
  Dtype dtype() const { return a_.dtype(); }
  double flops() const;  // of one run
  static double flops(const Backend& device);
  void run();

 private:
  Backend& device_;
  Tensor a_, b_, out_;
  std::shared_ptr<const Matmul> gemm_;  // of a CPU
};

// Copies `bytes` bytes in parallel; on a device that is no CPU as GemmCeiling.
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
