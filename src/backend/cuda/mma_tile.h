// Tiles of GEMMs on tensor cores: 128 x 128 sums of a block, in fp32 and in ascending order of depth, of bf16 operands that are copied into
// shared memory two steps of the depth at a time. Rows in memory begin at multiples of 16 bytes, and hold whole units of 8 elements.
//
// A warp has 32 x 64 of the sums, as 2 x 8 fragments of mma.m16n8k16.
#pragma once

#include "backend/cuda/gemm_operand.h"

namespace mantissa::gpu {

inline constexpr unsigned kMmaTile = 128, kMmaDepth = 32, kChunk = 8;  // elements; a chunk has 16 bytes
inline constexpr unsigned kWarpRows = 32, kWarpCols = 64;
static_assert(kMmaTile / kWarpRows * (kMmaTile / kWarpCols) * kWarp == kThreads);

// Of op(a) or op(b)^T: `outer` are rows or columns of the product. by_depth: memory is contiguous along the depth, [outer, depth], else
// [depth, outer].
struct MmaSide {
  const bf16* values;
  int64_t row;  // elements of a row in memory
  bool by_depth;
};

// [outer][depth] or [depth][outer], in rows that end in 8 elements more, so that 8 rows begin in different banks.
struct alignas(16) MmaSideTile {
  static constexpr unsigned kByDepth = kMmaDepth + kChunk, kByOuter = kMmaTile + kChunk;
  bf16 values[kMmaTile * kByDepth];
};
static_assert(kMmaDepth * MmaSideTile::kByOuter <= kMmaTile * MmaSideTile::kByDepth);

struct MmaTiles {
  MmaSideTile a[2], b[2];
};
struct MmaSums {
  float at[kWarpRows / 16][kWarpCols / 8][4] = {};
};

// Zeros outside the ranges, of which that along rows in memory has whole chunks.
__device__ inline void copy_side(MmaSideTile& tile, const MmaSide& side, Range outer, Range depth) {
  const unsigned across = (side.by_depth ? kMmaDepth : kMmaTile) / kChunk,
                 pitch = side.by_depth ? MmaSideTile::kByDepth : MmaSideTile::kByOuter;
  const Range down = side.by_depth ? outer : depth, along = side.by_depth ? depth : outer;
  for (unsigned i = thread(); i < kMmaTile * kMmaDepth / kChunk; i += kThreads) {
    const unsigned row = i / across, col = i % across * kChunk;
    const bool inside = down.first + row < down.end && along.first + col < along.end;
    const bf16* const from = side.values + (inside ? (down.first + row) * side.row + along.first + col : 0);
    copy_async16(&tile.values[row * pitch + col], from, inside);
  }
}

// The fragment of 16 x 16 elements from `outer` and `k` on, as op(a) has it: in op(b)^T the middle two words change places.
__device__ inline void load_fragment(uint32_t (&out)[4], const MmaSideTile& tile, bool by_depth, unsigned outer, unsigned k) {
  const unsigned low = lane() % 16, high = lane() / 16 * 8;
  if (by_depth) return load_matrices(out, &tile.values[(outer + low) * MmaSideTile::kByDepth + k + high]);
  const unsigned row = lane() % 8 + high, col = lane() / 8 % 2 * 8;
  load_matrices_transposed(out, &tile.values[(k + row) * MmaSideTile::kByOuter + outer + col]);
}

__device__ inline unsigned warp_row() { return warp() / (kMmaTile / kWarpCols) * kWarpRows; }
__device__ inline unsigned warp_col() { return warp() % (kMmaTile / kWarpCols) * kWarpCols; }

__device__ inline void multiply(const MmaSideTile& a, bool a_by_depth, const MmaSideTile& b, bool b_by_depth, MmaSums& sums) {
  MANTISSA_UNROLL
  for (unsigned k = 0; k < kMmaDepth; k += 16) {
    uint32_t left[kWarpRows / 16][4];
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kWarpRows / 16; ++i) load_fragment(left[i], a, a_by_depth, warp_row() + i * 16, k);
    MANTISSA_UNROLL
    for (unsigned j = 0; j < kWarpCols / 16; ++j) {
      uint32_t right[4];
      load_fragment(right, b, b_by_depth, warp_col() + j * 16, k);
      const uint32_t first[2] = {right[0], right[2]}, second[2] = {right[1], right[3]};
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kWarpRows / 16; ++i) {
        mma_bf16(sums.at[i][2 * j], left[i], first);
        mma_bf16(sums.at[i][2 * j + 1], left[i], second);
      }
    }
  }
}

// sums += a * b over a depth.
__device__ inline void add_mma(MmaTiles& tiles, const MmaSide& a, Range rows, const MmaSide& b, Range cols, Range depth, MmaSums& sums) {
  const auto copy = [&](int64_t k, unsigned to) {
    if (k < depth.end) {
      copy_side(tiles.a[to], a, rows, {k, depth.end});
      copy_side(tiles.b[to], b, cols, {k, depth.end});
    }
    commit_copies();
  };
  copy(depth.first, 0);
  unsigned now = 0;
  for (int64_t k = depth.first; k < depth.end; k += kMmaDepth) {
    copy(k + kMmaDepth, now ^ 1U);
    wait_copies<1>();
    barrier();  // the copies of all threads are there
    multiply(tiles.a[now], a.by_depth, tiles.b[now], b.by_depth, sums);
    barrier();  // behind those that still read what the next step copies over
    now ^= 1U;
  }
}

template <class Out>
__device__ inline void write_mma(const MmaSums& sums, const GemmTarget<Out>& to, Range rows, Range cols) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kWarpRows / 16; ++i) {
    MANTISSA_UNROLL
    for (unsigned j = 0; j < kWarpCols / 8; ++j) {
      MANTISSA_UNROLL
      for (unsigned e = 0; e < 4; ++e) {
        const int64_t row = rows.first + warp_row() + i * 16 + lane() / 4 + e / 2 * 8,
                      col = cols.first + warp_col() + j * 8 + lane() % 4 * 2 + e % 2;
        if (row < rows.end && col < cols.end) to.put(sums.at[i][j][e], row, col);
      }
    }
  }
}

}  // namespace mantissa::gpu
