// Attention on tensor cores, as in FlashAttention-2 (Dao 2023): tiles of heads in shared memory, and products with the fragments of
// mma.m16n8k16. A block has kFlashRows rows, queries or keys, and its warp w rows 16 w to 16 w + 15 of them; it goes over tiles of the
// others.
#pragma once

#include <numbers>

#include "backend/cuda/attention_operands.h"
#include "backend/cuda/reduce.h"

namespace mantissa::gpu {

inline constexpr unsigned kFlashRows = kThreads / kWarp * 16, kChunkOfHead = 8;  // a chunk has 16 bytes
inline constexpr float kLog2e = std::numbers::log2e_v<float>;                    // powers are of two

struct Fragment {  // of a left side, 16 x 16
  uint32_t at[4];
};

// Rows of a head. Chunk c of row r lies at c ^ (r % 8), so that the same chunk of eight rows is in different banks.
template <unsigned kRows, unsigned kChannels>
struct alignas(16) HeadTile {
  static_assert(kChannels % (8 * kChunkOfHead) == 0);
  bf16 values[kRows * kChannels];

  // Elements from here to the end of the chunk are contiguous.
  __device__ bf16* at(unsigned row, unsigned channel) {
    return &values[row * kChannels + (channel / kChunkOfHead ^ row % 8) * kChunkOfHead + channel % kChunkOfHead];
  }
};

// Zeros behind the last row. The copies are this thread's next group.
template <unsigned kRows, unsigned kChannels>
__device__ inline void copy_tile(HeadTile<kRows, kChannels>& tile, HeadRows<const bf16> head, Range rows) {
  constexpr unsigned kChunks = kChannels / kChunkOfHead;
  for (unsigned i = thread(); i < kRows * kChunks; i += kThreads) {
    const unsigned row = i / kChunks, channel = i % kChunks * kChunkOfHead;
    const bool inside = rows.first + row < rows.end;
    copy_async16(tile.at(row, channel), head.first + (inside ? (rows.first + row) * head.stride + channel : 0), inside);
  }
}

inline constexpr unsigned kStepKeys = 32;
template <unsigned kChannels>
struct KeyTiles {
  HeadTile<kStepKeys, kChannels> keys[2], values[2];
};
// Calls body(key, tile of keys, tile of values) for the steps of keys [begin, end), of which the next one is copied meanwhile. All threads
// of the block call it.
template <unsigned kChannels, class Body>
__device__ inline void for_each_step(KeyTiles<kChannels>& tiles, HeadRows<const bf16> keys, HeadRows<const bf16> values, int64_t begin,
                                     int64_t end, Body body) {
  const auto copy = [&](int64_t key, unsigned to) {
    if (key < end) {
      copy_tile(tiles.keys[to], keys, {key, end});
      copy_tile(tiles.values[to], values, {key, end});
    }
    commit_copies();
  };
  unsigned now = 0;
  copy(begin, now);
  for (int64_t key = begin; key < end; key += kStepKeys, now ^= 1U) {
    copy(key + kStepKeys, now ^ 1U);
    wait_copies<1>();
    barrier();  // the copies of all threads are there
    body(key, tiles.keys[now], tiles.values[now]);
    barrier();  // behind those that still read what the next step copies over
  }
}

// A thread has rows own_row(0) and own_row(1) of the block's; in fragments of eight columns, columns own_col() and own_col() + 1.
__device__ inline unsigned own_row(unsigned i) { return warp() * 16 + lane() / 4 + i * 8; }
__device__ inline unsigned own_col() { return lane() % 4 * 2; }

// This warp's rows as a left side: fragment k has channels 16 k to 16 k + 15. Zeros behind the last row.
template <unsigned kChannels>
__device__ inline void load_left(Fragment (&out)[kChannels / 16], HeadRows<const bf16> head, Range rows) {
  MANTISSA_UNROLL
  for (unsigned k = 0; k < kChannels / 16; ++k) {
    MANTISSA_UNROLL
    for (unsigned m = 0; m < 4; ++m) {
      const int64_t row = rows.first + own_row(m % 2), channel = k * 16 + m / 2 * 8 + own_col();
      out[k].at[m] = row < rows.end ? load<uint32_t>(head.first + row * head.stride + channel) : 0U;
    }
  }
}

// sums [16, kRows] += a * tile^T, where left(k) has the fragment of channels 16 k to 16 k + 15.
template <unsigned kRows, unsigned kChannels, class Left>
__device__ inline void add_scores(float (&sums)[kRows / 8][4], Left left, HeadTile<kRows, kChannels>& tile) {
  MANTISSA_UNROLL
  for (unsigned k = 0; k < kChannels / 16; ++k) {
    const Fragment a = left(k);
    MANTISSA_UNROLL
    for (unsigned j = 0; j < kRows / 16; ++j) {
      uint32_t b[4];
      load_matrices(b, tile.at(j * 16 + lane() % 16, k * 16 + lane() / 16 * 8));
      mma_bf16(sums[2 * j], a.at, {b[0], b[2]});
      mma_bf16(sums[2 * j + 1], a.at, {b[1], b[3]});
    }
  }
}

// sums [16, kChannels] += weights [16, kRows] * tile, with weights that are rounded to bf16.
template <unsigned kRows, unsigned kChannels>
__device__ inline void add_weighted(float (&sums)[kChannels / 8][4], const float (&weights)[kRows / 8][4],
                                    HeadTile<kRows, kChannels>& tile) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kRows / 16; ++j) {
    const auto &left = weights[2 * j], &right = weights[2 * j + 1];
    const uint32_t a[4] = {pack_bf16(left[0], left[1]), pack_bf16(left[2], left[3]), pack_bf16(right[0], right[1]),
                           pack_bf16(right[2], right[3])};
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kChannels / 16; ++c) {
      uint32_t b[4];
      load_matrices_transposed(b, tile.at(j * 16 + lane() % 16, c * 16 + lane() / 16 * 8));
      mma_bf16(sums[2 * c], a, {b[0], b[1]});
      mma_bf16(sums[2 * c + 1], a, {b[2], b[3]});
    }
  }
}

struct alignas(16) Chunk {
  uint32_t words[4];
};
__device__ inline bool has_nonfinite(uint32_t two_bf16) {
  return (two_bf16 & 0x7f80U) == 0x7f80U || (two_bf16 & 0x7f800000U) == 0x7f800000U;
}

// A weight of zero keeps what is not seen out of a sum only where it is finite. So a value of the tile that is not finite becomes zero, and
// those of the sums [16, kChannels] whose rows see it become NaN. seen(i, r): whether own_row(i) sees row r of the tile. All threads call
// it, between barriers; where all is finite it does nothing.
template <unsigned kRows, unsigned kChannels, class Seen>
__device__ inline void take_out_nonfinite(HeadTile<kRows, kChannels>& tile, float (&sums)[kChannels / 8][4], Seen seen) {
  bool finite = true;
  for (unsigned i = lane() * kChunkOfHead; i < kRows * kChannels; i += kWarp * kChunkOfHead) {
    for (const uint32_t word : load<Chunk>(&tile.values[i]).words) finite = finite && !has_nonfinite(word);
  }
  if (ballot(!finite) == 0) return;  // alike in all warps, each of which looks at the whole tile
  for (unsigned row = 0; row < kRows; ++row) {
    const bool sees[2] = {seen(0U, row), seen(1U, row)};
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kChannels / 8; ++c) {
      MANTISSA_UNROLL
      for (unsigned e = 0; e < 4; ++e) {
        const uint32_t value = tile.at(row, c * 8 + own_col() + e % 2)->bits;
        if (has_nonfinite(value) && sees[e / 2]) sums[c][e] = NAN;
      }
    }
  }
  barrier();
  for (unsigned i = thread(); i < kRows * kChannels; i += kThreads) {
    bf16& value = tile.values[i];
    if (has_nonfinite(value.bits)) value = bf16{};
  }
  barrier();
}

template <class Join>
__device__ inline float join_quad(float value, Join join) {
  value = join(value, shuffle_xor(value, 1));
  return join(value, shuffle_xor(value, 2));
}

// The least and the largest of the first keys that the queries of a range see.
struct FirstKeys {
  int64_t least, largest;
};
__device__ inline FirstKeys first_keys(const Mask& mask, Range queries) {
  if (!mask.segment_starts) return {mask.first(queries.first), mask.first(queries.end - 1)};
  FirstKeys own{INT64_MAX, 0};
  for (int64_t query = queries.first + lane(); query < queries.end; query += kWarp) {
    const int64_t first = mask.first(query);
    own = {Least<int64_t>()(first, own.least), Largest<int64_t>()(first, own.largest)};
  }
  return {join_warp(own.least, Least<int64_t>()), join_warp(own.largest, Largest<int64_t>())};
}

// Writes rounded sums [16, kChannels] to this warp's rows of a range.
template <unsigned kColumns>
__device__ inline void write_rows(const float (&sums)[kColumns][4], HeadRows<bf16> to, Range rows) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < 2; ++i) {
    const int64_t row = rows.first + own_row(i);
    if (row >= rows.end) continue;
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kColumns; ++c) {
      store(to.first + row * to.stride + c * 8 + own_col(), pack_bf16(sums[c][2 * i], sums[c][2 * i + 1]));
    }
  }
}

}  // namespace mantissa::gpu
