// The CPU backend users run: overrides the reference wherever there is a fast path. One file per kernel family, named as the reference's
// without the prefix. Results differ from the reference by rounding only, and never depend on the number of threads.
#pragma once

#include "backend/cpu/reference.h"

namespace mantissa {

class GemmEngine;

class CpuBackend final : public CpuReference {
 public:
  CpuBackend();
  ~CpuBackend() override;
  using CpuReference::run;
  const char* name() const override { return "cpu"; }
  int64_t fp32_products() const override;

  void run(const Fill& k) override;
  void run(const Convert& k) override;
  void run(const Add& k) override;
  void run(const Gemm& k) override;
  void run(const Quantize& k) override;
  void run(const Dequantize& k) override;
  void run(const RequantizeColumns& k) override;
  void run(const SumRows& k) override;
  void run(const EmbeddingForward& k) override;
  void run(const EmbeddingBackward& k) override;
  void run(const RmsNormForward& k) override;
  void run(const RmsNormBackward& k) override;
  void run(const LayerNormForward& k) override;
  void run(const LayerNormBackward& k) override;
  void run(const QkNormForward& k) override;
  void run(const QkNormBackward& k) override;
  void run(const Rope& k) override;
  void run(const AttentionForward& k) override;
  void run(const AttentionBackward& k) override;
  void run(const CachedAttention& k) override;
  void run(const SwiGluForward& k) override;
  void run(const SwiGluBackward& k) override;
  void run(const GeluForward& k) override;
  void run(const GeluBackward& k) override;
  void run(const CrossEntropy& k) override;
  void run(const AdamW& k) override;
  void run(const SquaredNorm& k) override;

 private:
  std::unique_ptr<GemmEngine> gemm_;
};

}  // namespace mantissa
