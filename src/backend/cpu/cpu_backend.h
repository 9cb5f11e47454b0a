// The CPU backend users run: overrides the reference wherever there is a fast path. One file per kernel family, named as the reference's without
// the prefix. Results differ from the reference by rounding only, and never depend on the number of threads.
#pragma once

#include "backend/cpu/reference.h"

namespace mantissa {

class GemmEngine;  // oneDNN: onednn_v2.cpp or onednn_v3.cpp

class CpuBackend final : public CpuReference {
 public:
  CpuBackend();
  ~CpuBackend() override;
  using CpuReference::run;
  const char* name() const override { return "cpu"; }

  void run(const Gemm& k) override;
  void run(const AttentionForward& k) override;

 private:
  std::unique_ptr<GemmEngine> gemm_;
};

}  // namespace mantissa
