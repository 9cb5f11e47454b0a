#include "backend/cpu/fast/tile_gemm.h"

#include <algorithm>
#include <utility>

#include "backend/cpu/fast/clones.h"

namespace mantissa {
namespace {

// One register of the instruction set at hand. Wider vectors than the machine's live in memory, so each width has its own GEMM.
using Vector8 [[gnu::vector_size(32), gnu::may_alias]] = float;
using Vector16 [[gnu::vector_size(64), gnu::may_alias]] = float;

template <class V>
constexpr int kLanes = static_cast<int>(sizeof(V) / sizeof(float));

// Written lane by lane: this form, and no loop, becomes one vector fma.
template <class V, size_t... Lane>
[[gnu::always_inline]] inline void fma_lanes(V& c, const V& a, const V& b, std::index_sequence<Lane...>) {
  c = V{__builtin_fmaf(a[Lane], b[Lane], c[Lane])...};
}

// out [R, N vectors] (+)= a [R, first .. last) * b [first .. last, N vectors], all of out in registers.
template <class V, int R, int N, bool kTransposed>
[[gnu::always_inline]] inline void micro_kernel(const TileGemm& t, int64_t row, int64_t col, int64_t first, int64_t last) {
  V sum[size_t(R)][size_t(N)];
  float* out = t.out + row * t.ldo + col;
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sum[i][j] = t.accumulate ? *reinterpret_cast<const V*>(out + i * t.ldo + j * kLanes<V>) : V{};
  }
  const float* a = kTransposed ? t.a + row : t.a + row * t.lda;
  const float* b = t.b + col;
  for (int64_t p = first; p < last; ++p) {
    V bp[size_t(N)];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) bp[j] = *reinterpret_cast<const V*>(b + p * t.ldb + j * kLanes<V>);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const V ap = (kTransposed ? a[p * t.lda + i] : a[i * t.lda + p]) - V{};
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) fma_lanes(sum[i][j], ap, bp[j], std::make_index_sequence<kLanes<V>>());
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) *reinterpret_cast<V*>(out + i * t.ldo + j * kLanes<V>) = sum[i][j];
  }
}

// Goes over panels of columns outside, so that a panel of b stays in the first-level cache while a streams past.
template <class V, int R, int N, bool kTransposed>
[[gnu::always_inline]] inline void gemm(const TileGemm& t) {
  constexpr int64_t kPanel = N * kLanes<V>;
  for (int64_t col = 0; col < t.cols; col += kPanel) {
    const int64_t rows = t.triangle == Triangle::out_upper ? std::min(t.rows, col + kPanel) : t.rows;
    for (int64_t row = 0; row < rows; row += R) {
      const int64_t first = t.triangle == Triangle::a_upper ? row : 0;
      const int64_t last = t.triangle == Triangle::a_lower ? std::min(t.depth, row + R) : t.depth;
      const bool right_half_only = t.triangle == Triangle::out_upper && row >= col + kPanel / 2;
      if (kPanel > 16 && col + kPanel > t.cols) {
        micro_kernel<V, R, 1, kTransposed>(t, row, col, first, last);
      } else if (kPanel > 16 && right_half_only) {
        micro_kernel<V, R, 1, kTransposed>(t, row, col + 16, first, last);
      } else {
        micro_kernel<V, R, N, kTransposed>(t, row, col, first, last);
      }
    }
  }
}

MANTISSA_TARGET("x86-64-v4") void gemm16(const TileGemm& t) { gemm<Vector16, 8, 2, false>(t); }
MANTISSA_TARGET("x86-64-v4") void gemm16_transposed(const TileGemm& t) { gemm<Vector16, 8, 2, true>(t); }

}  // namespace

void tile_gemm(const TileGemm& t) {
  if (cpu_level() == CpuLevel::x86_64_v4) {
    t.a_transposed ? gemm16_transposed(t) : gemm16(t);
  } else {
    t.a_transposed ? cloned<gemm<Vector8, 4, 2, true>>(t) : cloned<gemm<Vector8, 4, 2, false>>(t);
  }
}

}  // namespace mantissa
