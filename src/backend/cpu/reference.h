// A complete backend of plain kernels in a fixed order, the yardstick of every other one. The scalar is a template parameter, so the
// same code runs in fp32, bf16 (values widened to fp32 and rounded on store) and fp64. One file per kernel family: reference_*.cpp.
#pragma once

#include "backend/cpu/caching_allocator.h"
#include "mantissa/backend/backend.h"

namespace mantissa {

class CpuReference : public Backend {
 public:
  CpuReference();
  using Backend::run;
  const char* name() const override { return "cpu_reference"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  AllocatorStats allocator_stats() const override;

  void run(const Fill& k) override;
  void run(const Convert& k) override;
  void run(const RandomNormal& k) override;
  void run(const Add& k) override;
  void run(const Gemm& k) override;
  void run(const Quantize& k) override;
  void run(const Dequantize& k) override;
  void run(const FakeQuantize& k) override;
  void run(const RequantizeColumns& k) override;
  void run(const SwizzleScales& k) override;
  void run(const QuantizationError& k) override;
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
  void run(const Sum& k) override;
  void run(const SquaredNorm& k) override;

 private:
  std::shared_ptr<CachingAllocator> allocator_ = std::make_shared<CachingAllocator>();  // shared with every block handed out
};

}  // namespace mantissa
