// Products of tiles in shared memory, which GEMMs and attention are made of: kTile x kTile sums of a block of kThreads threads, in fp32
// and in ascending order of depth.
#pragma once

#include "backend/cuda/values.h"

namespace mantissa::gpu {

inline constexpr unsigned kTile = 64, kDepth = 32, kEach = 4;  // a thread has kEach x kEach sums
static_assert(kTile / kEach * (kTile / kEach) == kThreads);
// The least number of blocks of a multiprocessor: told nothing, the compiler makes room for more and keeps some of a thread's values in
// memory.
inline constexpr unsigned kGemmBlocks = 2;

// Splits the index of a block: returns index % count and leaves index / count.
__device__ inline int64_t take_last(unsigned& index, int64_t count) {
  const unsigned last = index % static_cast<unsigned>(count);
  index /= static_cast<unsigned>(count);
  return last;
}

struct alignas(16) Quad {
  float at[kEach];
};

struct Tile {  // [depth][row or column], each row ending in elements that spread the next ones over the banks
  alignas(16) float values[kDepth][kTile + kEach];
};

// The sums of a thread, in rows first_row() + i and columns first_col() + j of the tile.
struct Sums {
  float at[kEach][kEach] = {};
};
__device__ inline unsigned first_row() { return thread() / (kTile / kEach) * kEach; }
__device__ inline unsigned first_col() { return thread() % (kTile / kEach) * kEach; }

// Values outside [first, end) of the rows (of a left side) or columns (of a right one) and of the depth are zeros. Threads beside each
// other read along the depth where that is contiguous. read(row or column, depth)
struct Range {
  int64_t first, end;
};
template <class Read>
__device__ inline void load_values(Tile& tile, Range outer, Range depth, bool by_depth, Read read) {
  for (unsigned i = thread(); i < kTile * kDepth; i += kThreads) {
    const unsigned k = by_depth ? i % kDepth : i / kTile, o = by_depth ? i / kDepth : i % kTile;
    const bool inside = outer.first + o < outer.end && depth.first + k < depth.end;
    tile.values[k][o] = inside ? read(outer.first + o, depth.first + k) : 0.0F;
  }
}

__device__ inline void multiply(const Tile& a, const Tile& b, Sums& sums) {
  MANTISSA_UNROLL
  for (unsigned k = 0; k < kDepth; ++k) {
    const Quad left = load<Quad>(&a.values[k][first_row()]), right = load<Quad>(&b.values[k][first_col()]);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) sums.at[i][j] = multiply_add(left.at[i], right.at[j], sums.at[i][j]);
    }
  }
}

struct Sides {
  Tile a, b;
};

// sums += a * b over a depth. load_tile(tile, side, depth) loads the part of a side that begins at a depth.
template <class A, class B>
__device__ inline void add_product(Sides& sides, const A& a, const B& b, int64_t depth, Sums& sums) {
  for (int64_t k = 0; k < depth; k += kDepth) {
    barrier();  // behind those that still read what was there
    load_tile(sides.a, a, Range{k, depth});
    load_tile(sides.b, b, Range{k, depth});
    barrier();
    multiply(sides.a, sides.b, sums);
  }
}

}  // namespace mantissa::gpu
