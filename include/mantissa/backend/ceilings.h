// Measures what this machine can do at best, in the same run as a workload: performance is reported as a ratio to one of these.
#pragma once

#include <string>

#include "mantissa/backend/backend.h"

namespace mantissa {

class Matmul;

// Runs oneDNN's own 2048 x 2048 x 2048 GEMM with its own threading on normal data. Where the CPU has no bf16 dot product, the fp32 GEMM
// stands for bf16 as well, and dtype() says so.
class GemmCeiling {
 public:
  GemmCeiling(Backend& cpu, Dtype dtype);
  Dtype dtype() const { return a_.dtype(); }
  double flops() const;  // of one run
  void run();

 private:
  Tensor a_, b_, out_;
  std::shared_ptr<const Matmul> gemm_;
};

// Copies `bytes` bytes in parallel.
class CopyCeiling {
 public:
  CopyCeiling(Backend& cpu, int64_t bytes);
  double bytes() const { return 2.0 * static_cast<double>(from_.bytes()); }  // read + written by one run
  void run();

 private:
  Tensor from_, to_;
};

// Names the instruction set of GEMMs: "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16".
std::string gemm_instruction_set();

// Returns how many rows the backend "cpu" computes for a group of so many.
int64_t grouped_rows(int64_t rows);

}  // namespace mantissa
