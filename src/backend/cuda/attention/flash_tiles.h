// Attention on tensor cores, as in FlashAttention-2 (Dao 2023): tiles of heads in shared memory, and products with the fragments of
// mma.m16n8k16. A block has kFlashRows rows, queries or keys, and its warps a part of them each; it goes over tiles of the others.
#pragma once

#include <numbers>

#include "backend/cuda/attention/attention_operands.h"
#include "backend/cuda/rows/reduce.h"

namespace mantissa::gpu {

inline constexpr unsigned kFlashRows = 128, kChunkOfHead = 8;  // a chunk has 16 bytes
inline constexpr float kLog2e = std::numbers::log2e_v<float>;  // powers are of two

// Sizes of a kernel, which registers bound: a thread has up to 255 of them if eight warps share a multiprocessor. With more fragments of 16
// rows a warp loads less for as many products; with more rows in a step a block has fewer barriers.
struct FlashShape {
  unsigned fragments;  // fragments of a warp
  unsigned step;       // rows of a tile that the block goes over
  unsigned at_once;    // rows of a step of which a warp has the scores at a time
  unsigned blocks;     // blocks of a multiprocessor

  constexpr unsigned threads() const { return kFlashRows / (16 * fragments) * kWarp; }
};
template <unsigned kChannels>
inline constexpr FlashShape kForward = kChannels == 64 ? FlashShape{2, 64, 64, 2} : FlashShape{2, 64, 32, 2};
template <unsigned kChannels>
inline constexpr FlashShape kOfQueries = kChannels == 64 ? FlashShape{2, 64, 64, 2} : FlashShape{2, 32, 32, 2};
template <unsigned kChannels>
inline constexpr FlashShape kOfKeys = kChannels == 64 ? FlashShape{2, 64, 16, 2} : FlashShape{1, 64, 32, 1};

// The work of a block: rows of a head.
struct Place {
  int64_t sequence, head;
  Range rows;
};

// Operands and sums lie in registers as mma.m16n8k16 has them (PTX ISA, "Matrix Fragments for mma.m16n8k16"), where g = lane / 4 and t =
// lane % 4. An A fragment is 16 rows x 16 of the depth: register 0 has row g and columns 2 t and 2 t + 1, register 1 row g + 8, and
// registers 2 and 3 the same rows, and columns 8 further. A B fragment is 16 of the depth x 8 columns: register 0 has column g and depth 2
// t and 2 t + 1, register 1 depth 8 further. Sums are 16 rows x 8 columns: elements 0 and 1 have row g and columns 2 t and 2 t + 1,
// elements 2 and 3 row g + 8.
struct Fragment {  // an A fragment
  uint32_t at[4];
};
// Sums of a warp: [f][c] has its rows 16 f to 16 f + 15 and columns 8 c to 8 c + 7. Row r of a lane, at own_row<kFragments>(r) of the
// block, has elements 2 (r % 2) and 2 (r % 2) + 1 of [r / 2], in columns own_col() and own_col() + 1 of every eight.
template <unsigned kFragments, unsigned kColumns>
using FlashSums = float[kFragments][kColumns][4];
template <unsigned kFragments>
__device__ inline int own_row(unsigned r) {
  return static_cast<int>(warp() * kFragments * 16 + r * 8 + lane() / 4);
}
// The first row of a warp in the block, and the row behind its last.
template <unsigned kFragments>
__device__ inline int first_of_warp() {
  return static_cast<int>(warp() * kFragments * 16);
}
template <unsigned kFragments>
__device__ inline int end_of_warp() {
  return first_of_warp<kFragments>() + static_cast<int>(kFragments * 16);
}
__device__ inline unsigned own_col() { return lane() % 4 * 2; }

// Calls body(r, column, sum) for the sums of a lane, in row r of the lane.
template <unsigned kFragments, unsigned kColumns, class Body>
__device__ inline void for_each_sum(float (&sums)[kFragments][kColumns][4], Body body) {
  MANTISSA_UNROLL
  for (unsigned c = 0; c < 2 * kColumns; ++c) {
    MANTISSA_UNROLL
    for (unsigned r = 0; r < 2 * kFragments; ++r) {
      body(r, c / 2 * 8 + own_col() + c % 2, sums[r / 2][c / 2][r % 2 * 2 + c % 2]);
    }
  }
}
template <unsigned kFragments, unsigned kColumns>
__device__ inline void multiply(float (&sums)[kFragments][kColumns][4], const float (&by)[kFragments][kColumns][4]) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kFragments * kColumns * 4; ++i)
    sums[i / kColumns / 4][i / 4 % kColumns][i % 4] *= by[i / kColumns / 4][i / 4 % kColumns][i % 4];
}

// Rows of a head in shared memory, swizzled: chunk c of row r, 16 bytes, lies in place c ^ (r % 8), so that ldmatrix, which reads a chunk
// of eight rows at a time, reads different banks.
template <unsigned kRows, unsigned kChannels>
struct alignas(16) HeadTile {
  static_assert(kChannels % (8 * kChunkOfHead) == 0);
  bf16 values[kRows * kChannels];

  // Returns the address of a channel; the elements from there to the end of its chunk are contiguous.
  __device__ bf16* at(unsigned row, unsigned channel) {
    return &values[row * kChannels + (channel / kChunkOfHead ^ row % 8) * kChunkOfHead + channel % kChunkOfHead];
  }
  // The address that a lane gives to load_matrices() for 16 rows from `row` on, a multiple of 8, and channels 16 k to 16 k + 15: lanes 8 m
  // to 8 m + 7 address the rows of matrix m, which becomes register m. below(): matrix 1 is the lower eight rows, so that the registers are
  // those of an A fragment or, transposed, of the B fragments of eight channels each. beside(): matrix 1 is the next eight channels, so
  // that they are those of the B fragments of eight rows each.
  __device__ const bf16* below(unsigned row, unsigned k) const { return matrices(lane() % 16, lane() / 16, k) + row * kChannels; }
  __device__ const bf16* beside(unsigned row, unsigned k) const {
    return matrices(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2, k) + row * kChannels;
  }
  // Chunk 2 k + chunk of that row, which is lane() % 8 modulo 8.
  __device__ const bf16* matrices(unsigned row, unsigned chunk, unsigned k) const {
    return &values[row * kChannels + (k % 4 * 2 ^ (chunk ^ lane() % 8)) * kChunkOfHead] + k / 4 * 64;
  }
  __device__ Fragment fragment(unsigned row, unsigned k) const {
    Fragment out;
    load_matrices(out.at, below(row, k));
    return out;
  }
};

// Copies rows of a head asynchronously, of which there is one at least, and zeros behind the last one. All of kThreadsOfBlock threads call
// it; commit_copies() ends their group of copies.
template <unsigned kThreadsOfBlock, unsigned kRows, unsigned kChannels>
__device__ inline void copy_tile(HeadTile<kRows, kChannels>& tile, HeadRows<const bf16> head, Range rows) {
  constexpr unsigned kChunks = kChannels / kChunkOfHead, kAtOnce = kThreadsOfBlock / kChunks;
  static_assert(kRows % kAtOnce == 0 && kAtOnce % 8 == 0);  // a thread has chunks of one column, which lie alike in their rows
  const unsigned first = thread() / kChunks, channel = thread() % kChunks * kChunkOfHead;
  const int count = static_cast<int>(rows.end - rows.first) - static_cast<int>(first);  // rows from the first one of this thread on
  const bf16* from = head.first + (rows.first + first) * head.stride + channel;
  bf16* const to = tile.at(first, channel);
  MANTISSA_UNROLL
  for (unsigned row = 0; row < kRows; row += kAtOnce, from += kAtOnce * head.stride)
    copy_async16(to + row * kChannels, from, static_cast<int>(row) < count);
}

template <unsigned kStep, unsigned kChannels>
struct KeyTiles {
  HeadTile<kStep, kChannels> keys[2], values[2];
};
// Goes over keys [begin, end) by kStep with two buffers: calls body(first key, tile of keys, tile of values) while the next tiles are
// copied. All threads of the block call it; copies that they have begun before have arrived, too.
template <unsigned kThreadsOfBlock, unsigned kStep, unsigned kChannels, class Body>
__device__ inline void for_each_step(KeyTiles<kStep, kChannels>& tiles, HeadRows<const bf16> keys, HeadRows<const bf16> values, int begin,
                                     int end, Body body) {
  const auto copy = [&](int key, unsigned to) {
    if (key < end) {
      copy_tile<kThreadsOfBlock>(tiles.keys[to], keys, {key, end});
      copy_tile<kThreadsOfBlock>(tiles.values[to], values, {key, end});
    }
    commit_copies();
  };
  constexpr int kKeys = kStep;
  unsigned now = 0;
  copy(begin / kKeys * kKeys, now);
  for (int key = begin / kKeys * kKeys; key < end; key += kKeys, now ^= 1U) {
    wait_copies<0>();
    barrier();  // the copies of all threads are there, and nobody reads the other tiles any more
    copy(key + kKeys, now ^ 1U);
    body(key, tiles.keys[now], tiles.values[now]);
  }
}

// Loads A fragments of a warp's rows from global memory: out[f][k] has channels 16 k to 16 k + 15. Rows behind the last one are zeros.
template <unsigned kFragments, unsigned kDepth>
__device__ inline void load_left(Fragment (&out)[kFragments][kDepth], HeadRows<const bf16> head, Range rows) {
  const auto* const words = reinterpret_cast<const uint32_t*>(head.first);
  MANTISSA_UNROLL
  for (unsigned f = 0; f < kFragments; ++f) {
    MANTISSA_UNROLL
    for (unsigned k = 0; k < kDepth; ++k) {
      MANTISSA_UNROLL
      for (unsigned m = 0; m < 4; ++m) {
        const int64_t row = rows.first + own_row<kFragments>(2 * f + m % 2), word = k * 8 + m / 2 * 4 + lane() % 4;
        out[f][k].at[m] = row < rows.end ? load<uint32_t>(words + row * head.stride / 2 + word) : 0U;
      }
    }
  }
}

// Returns left(f, k), which loads the A fragment of a warp's rows 16 f to 16 f + 15 and channels 16 k to 16 k + 15 from a tile.
template <unsigned kFragments, unsigned kRows, unsigned kChannels>
__device__ inline auto rows_of_warp(const HeadTile<kRows, kChannels>& tile) {
  return [&tile](unsigned f, unsigned k) { return tile.fragment((warp() * kFragments + f) * 16, k); };
}

// sums += A B^T over all channels, where left(f, k) gives the fragments of A, and B is the rows of a tile from `first` on.
template <unsigned kFragments, unsigned kColumns, unsigned kRows, unsigned kChannels, class Left>
__device__ inline void add_scores(float (&sums)[kFragments][kColumns][4], Left left, const HeadTile<kRows, kChannels>& tile,
                                  unsigned first = 0) {
  MANTISSA_UNROLL
  for (unsigned k = 0; k < kChannels / 16; ++k) {
    Fragment a[kFragments];
    MANTISSA_UNROLL
    for (unsigned f = 0; f < kFragments; ++f) a[f] = left(f, k);
    MANTISSA_UNROLL
    for (unsigned j = 0; j < kColumns / 2; ++j) {
      uint32_t b[4];
      load_matrices(b, tile.beside(first + j * 16, k));
      MANTISSA_UNROLL
      for (unsigned f = 0; f < kFragments; ++f) {
        mma_bf16(sums[f][2 * j], a[f].at, {b[0], b[1]});
        mma_bf16(sums[f][2 * j + 1], a[f].at, {b[2], b[3]});
      }
    }
  }
}

// Sums, rounded to bf16, as A fragments whose depth is their columns: those of 16 columns lie in the lanes and registers of one already.
template <unsigned kFragments, unsigned kDepth>
struct WeightFragments {
  Fragment at[kFragments][kDepth];
};
template <unsigned kFragments, unsigned kColumns>
__device__ inline WeightFragments<kFragments, kColumns / 2> rounded_weights(const float (&sums)[kFragments][kColumns][4]) {
  WeightFragments<kFragments, kColumns / 2> out;
  MANTISSA_UNROLL
  for (unsigned f = 0; f < kFragments; ++f) {
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kColumns; ++c) {
      MANTISSA_UNROLL
      for (unsigned i = 0; i < 2; ++i) out.at[f][c / 2].at[c % 2 * 2 + i] = pack_bf16(sums[f][c][2 * i], sums[f][c][2 * i + 1]);
    }
  }
  return out;
}

// sums += weights B, where B is the rows of a tile from `first` on.
template <unsigned kFragments, unsigned kColumns, unsigned kDepth, unsigned kRows, unsigned kChannels>
__device__ inline void add_weighted(float (&sums)[kFragments][kColumns][4], const WeightFragments<kFragments, kDepth>& weights,
                                    const HeadTile<kRows, kChannels>& tile, unsigned first = 0) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kDepth; ++j) {
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kChannels / 16; ++c) {
      uint32_t b[4];
      load_matrices_transposed(b, tile.below(first + j * 16, c));
      MANTISSA_UNROLL
      for (unsigned f = 0; f < kFragments; ++f) {
        mma_bf16(sums[f][2 * c], weights.at[f][j].at, {b[0], b[1]});
        mma_bf16(sums[f][2 * c + 1], weights.at[f][j].at, {b[2], b[3]});
      }
    }
  }
}

struct alignas(16) Chunk {
  uint32_t words[4];
};
__device__ inline bool has_nonfinite(uint32_t two_bf16) {
  return (two_bf16 & 0x7f80U) == 0x7f80U || (two_bf16 & 0x7f800000U) == 0x7f800000U;
}

template <unsigned kChannels, class Bits>
struct NonfiniteRows {
  Bits of_channel[kChannels];  // a bit for each row
};
template <unsigned kCount>
using BitsOfRows = std::conditional_t<kCount <= 32, uint32_t, uint64_t>;

// True if a block has room for its tiles and for what take_out_nonfinite() has beside them, on any GPU: each has 99 KiB.
template <class Tiles, unsigned kCount, unsigned kChannels>
inline constexpr bool kFitsAnyGpu =
    sizeof(Tiles) + sizeof(NonfiniteRows<kChannels, BitsOfRows<kCount>>) + sizeof(OfWarps<unsigned, Largest<unsigned>>) <= size_t{99} << 10;

// Keeps values that are not finite from sums whose rows do not see them: 0 * Inf and 0 * NaN are NaN, so a weight of zero does not mask
// them. Each such value in rows [first, first + kCount) of a tile becomes zero, and the sums whose rows see it become NaN. seen(r, row) is
// true if row r of a lane sees that row of the tile. All threads of the block call it; where all values are finite it changes nothing.
template <unsigned kCount, unsigned kFragments, unsigned kColumns, unsigned kRows, unsigned kChannels, class Seen>
__device__ inline void take_out_nonfinite(HeadTile<kRows, kChannels>& tile, float (&sums)[kFragments][kColumns][4], Seen seen,
                                          unsigned first = 0) {
  static_assert(kCount <= 64);
  using Bits = BitsOfRows<kCount>;
  unsigned found = 0;
  for (unsigned i = thread() * kChunkOfHead; i < kCount * kChannels; i += threads() * kChunkOfHead) {
    for (const uint32_t word : load<Chunk>(&tile.values[first * kChannels + i]).words) found |= has_nonfinite(word) ? 1U : 0U;
  }
  if (join_block(found, 0U, Largest<unsigned>()) == 0) return;
  auto& nonfinite = block_shared<NonfiniteRows<kChannels, Bits>>();
  if (thread() < kChannels) {
    Bits rows = 0;
    for (unsigned row = 0; row < kCount; ++row) {
      bf16& value = *tile.at(first + row, thread());
      if (has_nonfinite(value.bits)) rows |= Bits{1} << row, value = bf16{};
    }
    nonfinite.of_channel[thread()] = rows;
  }
  Bits seen_rows[2 * kFragments] = {};
  for (unsigned row = 0; row < kCount; ++row) {
    MANTISSA_UNROLL
    for (unsigned r = 0; r < 2 * kFragments; ++r) seen_rows[r] |= Bits{seen(r, first + row) ? 1U : 0U} << row;
  }
  barrier();
  MANTISSA_UNROLL
  for (unsigned c = 0; c < 2 * kColumns; ++c) {
    const Bits rows = nonfinite.of_channel[c / 2 * 8 + own_col() + c % 2];
    MANTISSA_UNROLL
    for (unsigned r = 0; r < 2 * kFragments; ++r) {
      if ((rows & seen_rows[r]) != 0) sums[r / 2][c / 2][r % 2 * 2 + c % 2] = NAN;
    }
  }
}

// Joins the four lanes that have one row of sums.
template <class Join>
__device__ inline float join_quad(float value, Join join) {
  value = join(value, shuffle_xor(value, 1));
  return join(value, shuffle_xor(value, 2));
}

// The least and the largest of the first keys that the queries of a range see.
struct FirstKeys {
  int least, largest;
};
__device__ inline FirstKeys first_keys(const Mask& mask, Range queries) {
  const auto first = [&](int64_t query) { return static_cast<int>(mask.first(query)); };
  if (!mask.segment_starts) return {first(queries.first), first(queries.end - 1)};
  FirstKeys own{INT32_MAX, 0};
  for (int64_t query = queries.first + lane(); query < queries.end; query += kWarp) {
    own = {Least<int>()(first(query), own.least), Largest<int>()(first(query), own.largest)};
  }
  return {join_warp(own.least, Least<int>()), join_warp(own.largest, Largest<int>())};
}

// The keys [first, last] that a query sees. Positions are below 2^31.
struct alignas(8) Sight {
  int first, last;
  __device__ bool sees(int key) const { return first <= key && key <= last; }
};
// Returns the keys that the query at a position sees: none if it is not inside its sequence.
__device__ inline Sight sight_of(const Mask& mask, int64_t position, bool inside) {
  return inside ? Sight{static_cast<int>(mask.first(position)), static_cast<int>(position)} : Sight{0, -1};
}
// Masks sums, whose rows are queries and whose columns are keys from `key` on: they become `hidden` where the query does not see the key.
template <unsigned kFragments, unsigned kColumns>
__device__ inline void hide(float (&sums)[kFragments][kColumns][4], const Sight (&queries)[kFlashRows], int key, float hidden) {
  MANTISSA_UNROLL
  for (unsigned r = 0; r < 2 * kFragments; ++r) {
    const Sight own = load<Sight>(&queries[own_row<kFragments>(r)]);
    const int first = own.first - key - static_cast<int>(own_col()), last = own.last - key - static_cast<int>(own_col());
    MANTISSA_UNROLL
    for (unsigned c = 0; c < 2 * kColumns; ++c) {
      const int column = static_cast<int>(c / 2 * 8 + c % 2);
      if (column < first || column > last) sums[r / 2][c / 2][r % 2 * 2 + c % 2] = hidden;
    }
  }
}

// Writes sums to a warp's rows of a range, times a factor of each row and rounded.
template <unsigned kFragments, unsigned kColumns>
__device__ inline void write_rows(const float (&sums)[kFragments][kColumns][4], const float (&factors)[2 * kFragments], HeadRows<bf16> to,
                                  Range rows) {
  MANTISSA_UNROLL
  for (unsigned r = 0; r < 2 * kFragments; ++r) {
    const int64_t row = rows.first + own_row<kFragments>(r);
    if (row >= rows.end) continue;
    bf16* const own = to.first + row * to.stride + own_col();
    MANTISSA_UNROLL
    for (unsigned c = 0; c < kColumns; ++c) {
      const auto& four = sums[r / 2][c];
      store(own + c * 8, pack_bf16(four[r % 2 * 2] * factors[r], four[r % 2 * 2 + 1] * factors[r]));
    }
  }
}

}  // namespace mantissa::gpu
