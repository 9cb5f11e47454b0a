// The CPU backend that users run: it overrides the reference wherever there is a fast path. Files hold a family of kernels
// each, in the folders gemm, attention, codes (quantizing and back) and rows (all else). Results differ from the reference by rounding
// only, and never depend on the number of threads.
#pragma once

#include <atomic>

#include "backend/cpu/reference/reference.h"
#include "base/cpu_level.h"

namespace mantissa {

class CpuBackend final : public CpuReference {
 public:
  CpuBackend() { cpu_level(); }  // a wrong MANTISSA_MAX_CPU_LEVEL is an error here and not of the first kernel
  const char* name() const override { return "cpu"; }
  bool computes_fp64() const override { return false; }
  int64_t fp32_gemms() const override { return fp32_gemms_; }
  std::string unequal_places() const override;

 protected:
  using CpuReference::execute;
  void execute(const Fill& k) override;
  void execute(const Convert& k) override;
  void execute(const RandomNormal& k) override;
  void execute(const Add& k) override;
  void execute(const TreeSum& k) override;
  void execute(const AddBias& k) override;
  void execute(const Gemm& k) override;
  void execute(const Quantize& k) override;
  void execute(const Dequantize& k) override;
  void execute(const RequantizeColumns& k) override;
  void execute(const Simulate& k) override;
  void execute(const SumRows& k) override;
  void execute(const EmbeddingForward& k) override;
  void execute(const EmbeddingBackward& k) override;
  void execute(const LayerNormForward& k) override;
  void execute(const LayerNormBackward& k) override;
  void execute(const QkNormForward& k) override;
  void execute(const QkNormBackward& k) override;
  void execute(const Rope& k) override;
  void execute(const AttentionForward& k) override;
  void execute(const AttentionBackward& k) override;
  void execute(const CachedAttention& k) override;
  void execute(const SwiGluForward& k) override;
  void execute(const SwiGluBackward& k) override;
  void execute(const GeluForward& k) override;
  void execute(const GeluBackward& k) override;
  void execute(const CrossEntropy& k) override;
  void execute(const CrossEntropyShare& k) override;
  void execute(const CrossEntropyOfShares& k) override;
  void execute(const DistillationShare& k) override;
  void execute(const DistillationOfShares& k) override;
  void execute(const Unpermute& k) override;
  void execute(const GroupedGemm& k) override;
  void execute(const AdamW& k) override;
  void execute(const MuonMomentum& k) override;
  void execute(const DivideByNorm& k) override;
  void execute(const NewtonSchulzPolynomial& k) override;
  void execute(const MuonUpdate& k) override;
  void execute(const SquaredNorm& k) override;

 private:
  std::atomic<int64_t> fp32_gemms_ = 0;
};

}  // namespace mantissa
