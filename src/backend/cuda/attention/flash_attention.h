// Attention on tensor cores: of bf16 values in heads of 64 or 128 channels. Scores and sums are fp32, as tensor cores add; weights and
// their gradients are rounded to bf16 before they are multiplied.
#pragma once

#include "backend/cuda/attention/attention_operands.h"
#include "backend/cuda/gemm/aligned.h"
#include "gpu/runtime.h"

namespace mantissa::gpu {

inline bool takes_flash(Dtype dtype, int64_t head_dim, double scale) {
  return dtype == Dtype::bf16 && (head_dim == 64 || head_dim == 128) && scale > 0.0;  // the largest product is the largest score
}

template <class Operands>
struct FlashLaunch {
  void (*kernel)(Operands);
  Grid grid;
};
// The kernel of the forward pass for so many sequences. It needs operands that takes_flash() takes and that are aligned().
FlashLaunch<Attention<bf16>> flash_forward(const Attention<bf16>& k, int64_t sequences);
// Kernels that give dq, and dk and dv.
FlashLaunch<AttentionGradient<bf16>> flash_dq(const AttentionGradient<bf16>& k, int64_t sequences);
FlashLaunch<AttentionGradient<bf16>> flash_dkv(const AttentionGradient<bf16>& k, int64_t sequences);

}  // namespace mantissa::gpu
