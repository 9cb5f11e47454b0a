// Heads of packed rows as sides of tile products, and the operations of attention on a tile of queries and keys, for values of any dtype.
#pragma once

#include "backend/cuda/attention/attention_operands.h"
#include "backend/cuda/gemm/gemm_operand.h"
#include "backend/cuda/rows/reduce.h"

namespace mantissa::gpu {

// Rows of a range, with channels as the depth.
template <class T>
struct ByChannels {
  HeadRows<const T> x;
  Range rows;
};
template <class T>
__device__ inline void load_tile(Tile& tile, const ByChannels<T>& side, Range depth) {
  const HeadRows<const T> x = side.x;
  load_values(tile, side.rows, depth, true, [=](int64_t row, int64_t channel) { return value_of(x.first[row * x.stride + channel]); });
}

// Channels of a range, with rows as the depth.
template <class T>
struct ByRows {
  HeadRows<const T> x;
  Range channels;
};
template <class T>
__device__ inline void load_tile(Tile& tile, const ByRows<T>& side, Range depth) {
  const HeadRows<const T> x = side.x;
  load_values(tile, side.channels, depth, false, [=](int64_t channel, int64_t row) { return value_of(x.first[row * x.stride + channel]); });
}

// The weight between a query and a key that it does not see. It is not zero, because a value that is not seen may be NaN, but a signaling
// NaN, which no arithmetic gives.
__device__ inline float hidden_weight() { return __builtin_bit_cast(float, 0x7fa00000U); }
__device__ inline bool is_hidden(float weight) { return __builtin_bit_cast(uint32_t, weight) == 0x7fa00000U; }

// The sums of a tile as a left side, with their columns as the depth.
struct Weights {
  Tile halves[kTile / kDepth];
};

// Like multiply(), but without the products of weights that are hidden.
__device__ inline void multiply_seen(const Tile& weights, const Tile& b, Sums& sums) {
  for (unsigned k = 0; k < kDepth; ++k) {
    const Quad left = load<Quad>(&weights.values[k][first_row()]), right = load<Quad>(&b.values[k][first_col()]);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      const bool seen = !is_hidden(left.at[i]);
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const float sum = multiply_add(left.at[i], right.at[j], sums.at[i][j]);
        sums.at[i][j] = seen ? sum : sums.at[i][j];
      }
    }
  }
}

// out += the products of kept sums and rows [rows.first, rows.end). `weights` may be in use: a barrier is between what is kept and its use.
template <class T>
__device__ inline void add_weighted(Sides& sides, Weights& weights, const Sums& kept, const ByRows<T>& x, Range rows, Sums& out) {
  bool hides = false;
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kEach; ++j) {
    Quad column;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      column.at[i] = kept.at[i][j];
      hides = hides || is_hidden(column.at[i]);
    }
    const unsigned depth = first_col() + j;
    store(&weights.halves[depth / kDepth].values[depth % kDepth][first_row()], column);
  }
  hides = ballot(hides) != 0;  // in the rows of this warp, which are those that it multiplies
  for (const Tile& half : weights.halves) {
    barrier();
    load_tile(sides.b, x, rows);
    barrier();
    hides ? multiply_seen(half, sides.b, out) : multiply(half, sides.b, out);
    rows.first += kDepth;
  }
}

// Joins the threads that have sums of one row.
template <class Join>
__device__ inline float join_row(float value, Join join) {
  for (unsigned lanes = kTile / kEach / 2; lanes > 0; lanes /= 2) value = join(value, shuffle_xor(value, lanes));
  return value;
}

// The least first key of a tile of queries. All threads of the block call it.
__device__ inline int64_t first_of(const Mask& mask, Range queries) {
  if (!mask.segment_starts) return mask.first(queries.first);
  const int64_t own = queries.first + thread() % kTile;
  return join_block(own < queries.end ? mask.first(own) : INT64_MAX, int64_t{INT64_MAX}, Least<int64_t>());
}

// Writes rounded sums to rows and channels of a range.
template <class T>
__device__ inline void write_rows(const Sums& sums, HeadRows<T> to, Range rows, Range channels) {
  GemmTarget<T>{to.first, to.stride, false}.write(sums, rows, channels);
}

}  // namespace mantissa::gpu
