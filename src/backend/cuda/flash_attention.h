// Attention on tensor cores: of bf16 values in heads of 64 or 128 channels that lie at multiples of 16 bytes. Scores and sums are fp32, as
// tensor cores add; weights and their gradients are rounded to bf16 before they are multiplied.
#pragma once

#include <algorithm>
#include <bit>
#include <initializer_list>

#include "backend/cuda/attention_operands.h"
#include "gpu/runtime.h"

namespace mantissa::gpu {

// Whether each begins at a multiple of 16 bytes.
inline bool starts_chunks(std::initializer_list<const bf16*> operands) {
  return std::ranges::all_of(operands, [](const bf16* each) { return std::bit_cast<uintptr_t>(each) % 16 == 0; });
}

template <class Operands>
struct FlashLaunch {
  void (*kernel)(Operands) = nullptr;  // null: none takes these operands
  Grid grid{};
};
// For so many sequences.
FlashLaunch<Attention<bf16>> flash_forward(const Attention<bf16>& k, int64_t sequences);
// Kernels that give dq, and dk and dv.
FlashLaunch<AttentionGradient<bf16>> flash_dq(const AttentionGradient<bf16>& k, int64_t sequences);
FlashLaunch<AttentionGradient<bf16>> flash_dkv(const AttentionGradient<bf16>& k, int64_t sequences);

}  // namespace mantissa::gpu
