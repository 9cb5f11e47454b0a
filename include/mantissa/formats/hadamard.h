// The randomized Hadamard transform of blocks of 16 or 32 elements: x D H / sqrt(n), H by Sylvester's construction, D a diagonal of fixed
// signs. It is orthogonal, so the product of two matrices that are both transformed along the contraction stays as it was. With blocks of
// 16 it is Transformer Engine's (`get_wgrad_sign_vector`).
#pragma once

#include <cstdint>

namespace mantissa {

// Bit i is set where element i changes its sign. The lower half is Transformer Engine's; the upper half are bits of pi.
constexpr uint32_t kHadamardSigns = 0x6A88D7E8U;
constexpr double kRootOf32nd = 0x1.6a09e667f3bcdp-3;  // 1 / sqrt(32)

// Transforms kBlocks blocks of n = 16 or 32 elements in place: x has n * kBlocks, before and after, and element i of block b is
// x[i * kBlocks + b], so that vectors have many blocks. It is inlined, for kernels that are compiled for several CPUs. Sums of bf16 values
// are exact in fp64 unless they differ by more than 2^40.
template <int64_t kBlocks = 1>
[[gnu::always_inline]] inline void hadamard_transform(double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const bool minus = (kHadamardSigns >> i & 1U) != 0;
    for (int64_t b = i * kBlocks; b < (i + 1) * kBlocks; ++b) x[b] = minus ? -x[b] : x[b];
  }
  for (int64_t half = kBlocks; half < n * kBlocks; half *= 2) {
    for (int64_t begin = 0; begin < n * kBlocks; begin += 2 * half) {
      for (int64_t i = begin; i < begin + half; ++i) {
        const double a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  const double factor = n == 16 ? 0.25 : kRootOf32nd;
  for (int64_t i = 0; i < n * kBlocks; ++i) x[i] = x[i] * factor + 0.0;  // a sum of zeros is +0
}

}  // namespace mantissa
