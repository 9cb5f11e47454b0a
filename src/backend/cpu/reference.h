// A complete backend of plain kernels in a fixed order, the yardstick of every other one. The scalar is a template parameter, so the
// same code runs in fp32, bf16 (values widened to fp32 and rounded on store) and fp64. One file per kernel family: reference_*.cpp.
#pragma once

#include "backend/cpu/caching_allocator.h"
#include "mantissa/backend/backend.h"

namespace mantissa {

class CpuReference : public Backend {
 public:
  CpuReference();
  using Backend::execute;
  const char* name() const override { return "cpu_reference"; }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  AllocatorStats allocator_stats() const override;
  bool host_memory() const override { return true; }
  void upload(const void* from, const Tensor& to) override;
  void download(const Tensor& from, void* to) override;

  void execute(const Fill& k) override;
  void execute(const Convert& k) override;
  void execute(const RandomNormal& k) override;
  void execute(const Add& k) override;
  void execute(const Gemm& k) override;
  void execute(const Quantize& k) override;
  void execute(const Dequantize& k) override;
  void execute(const FakeQuantize& k) override;
  void execute(const RequantizeColumns& k) override;
  void execute(const SwizzleScales& k) override;
  void execute(const QuantizationError& k) override;
  void execute(const SumRows& k) override;
  void execute(const EmbeddingForward& k) override;
  void execute(const EmbeddingBackward& k) override;
  void execute(const RmsNormForward& k) override;
  void execute(const RmsNormBackward& k) override;
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
  void execute(const AdamW& k) override;
  void execute(const FinishGradients& k) override;
  void execute(const Sum& k) override;
  void execute(const SquaredNorm& k) override;

 private:
  std::shared_ptr<CachingAllocator> allocator_ =
      std::make_shared<CachingAllocator>(host_memory_source());  // shared with every block handed out
};

}  // namespace mantissa
