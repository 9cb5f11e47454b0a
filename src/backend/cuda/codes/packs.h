// Rows that threads go through eight elements at a time, by 16 bytes where they can. Which elements a thread has, and so the order of a
// sum, does not depend on where the rows begin.
#pragma once

#include "backend/cuda/rows/reduce.h"
#include "backend/cuda/values.h"
#include "gpu/runtime.h"

namespace mantissa::gpu {

inline constexpr unsigned kPack = 8;  // elements

struct Pack {
  float at[kPack];
};

template <class T>
struct alignas(16) PackInMemory {
  T at[kPack];
};
// Two elements in each word, the first in the low half: taking halves of registers would cost an instruction more for each element.
template <>
struct alignas(16) PackInMemory<bf16> {
  uint32_t words[kPack / 2];
};

template <class T>
__device__ inline Pack values_of(const PackInMemory<T>& pack) {
  Pack out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) out.at[i] = value_of(pack.at[i]);
  return out;
}
template <>
__device__ inline Pack values_of<bf16>(const PackInMemory<bf16>& pack) {
  Pack out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; i += 2) {
    out.at[i] = __builtin_bit_cast(float, pack.words[i / 2] << 16);
    out.at[i + 1] = __builtin_bit_cast(float, pack.words[i / 2] & 0xffff0000U);
  }
  return out;
}
template <class T>
__device__ inline PackInMemory<T> rounded_pack(const Pack& pack) {
  PackInMemory<T> out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) out.at[i] = rounded<T>(pack.at[i]);
  return out;
}
// The instruction rounds two numbers as to_bf16() does, but gives another NaN.
template <>
__device__ inline PackInMemory<bf16> rounded_pack<bf16>(const Pack& pack) {
  PackInMemory<bf16> out;
  bool numbers = true;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; i += 2) {
    out.words[i / 2] = pack_bf16(pack.at[i], pack.at[i + 1]);
    numbers = numbers && pack.at[i] == pack.at[i] && pack.at[i + 1] == pack.at[i + 1];
  }
  if (numbers) return out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; i += 2) out.words[i / 2] = to_bf16(pack.at[i]).bits | uint32_t{to_bf16(pack.at[i + 1]).bits} << 16;
  return out;
}

// `count` elements from `values` on. aligned: they begin at a multiple of 16 bytes.
template <class T>
struct Packs {
  T* values;
  int64_t count;
  bool aligned;

  // Row i of a matrix of which these are row 0.
  __device__ Packs row(int64_t i) const { return {values + i * count, count, aligned}; }
  // Reads a pack, with zeros behind the end.
  __device__ Pack read(int64_t first) const {
    using Element = std::remove_const_t<T>;
    if (aligned && first + kPack <= count) return values_of(load<PackInMemory<Element>>(values + first));
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = first + i < count ? value_of(values[first + i]) : 0.0F;
    return out;
  }
  // Writes a rounded pack, but nothing behind the end.
  __device__ void write(int64_t first, const Pack& pack) const {
    if (aligned && first + kPack <= count) {
      store(values + first, rounded_pack<T>(pack));
    } else {
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) {
        if (first + i < count) values[first + i] = rounded<T>(pack.at[i]);
      }
    }
  }
};

// All elements of a tensor.
template <class T>
Packs<T> packs_of(const Tensor& tensor) {
  T* const values = tensor.device_data<std::remove_const_t<T>>();
  return {values, tensor.elements(), reinterpret_cast<uintptr_t>(values) % 16 == 0};
}

// Returns true if rows of so many columns begin at multiples of 16 bytes, in all of these operands, of which some may be null.
template <class... T>
bool begin_at_packs(int64_t columns, const T*... operands) {
  return columns % kPack == 0 && ((reinterpret_cast<uintptr_t>(operands) | ...) % 16) == 0;
}

// Rows of so many columns, from row 0 on; `aligned` as begin_at_packs() says of all operands of a kernel.
struct RowPacks {
  int64_t columns;
  bool aligned;

  template <class T>
  Packs<T> operator()(T* values) const {
    return {values, columns, aligned};
  }
};

// Calls body(first) for the packs of [0, count) that belong to this thread of a grid of blocks_for_packs(count).
inline int64_t blocks_for_packs(int64_t count) { return blocks_for(ceil_div(count, int64_t{kPack})); }
template <class Body>
__device__ inline void for_each_pack(int64_t count, Body body) {
  for_each_element(ceil_div(count, int64_t{kPack}), [=](int64_t i) { body(i * kPack); });
}

// The team that has a row: a warp, or a block where rows are long.
struct OfWarp {
  static constexpr unsigned kSize = kWarp, kRowsOfBlock = kWarpsOfBlock;
  __device__ static int64_t row() { return block() * kRowsOfBlock + warp(); }
  __device__ static unsigned rank() { return lane(); }
  __device__ static float sum(float value) { return join_warp(value, Plus<float>()); }
};
struct OfBlock {
  static constexpr unsigned kSize = kThreads, kRowsOfBlock = 1;
  __device__ static int64_t row() { return block(); }
  __device__ static unsigned rank() { return thread(); }
  __device__ static float sum(float value) { return block_sum(value); }
};
// Columns of a warp's row, at most. The number of columns alone decides, so that a row has the same bits beside others.
inline constexpr int64_t kColumnsOfWarp = 4096;

// Calls body.operator()<Team>(grid) with the team that has a row of so many columns.
template <class Body>
void with_team(int64_t rows, int64_t columns, Body&& body) {
  if (columns <= kColumnsOfWarp)
    body.template operator()<OfWarp>(Grid{ceil_div(rows, int64_t{OfWarp::kRowsOfBlock}), kThreads});
  else
    body.template operator()<OfBlock>(Grid{rows, kThreads});
}

// Calls body(first) for the packs of a row that belong to this thread of its team.
template <class Team, class Body>
__device__ inline void for_each_pack_of_row(int64_t columns, Body body) {
  for (int64_t first = Team::rank() * kPack; first < columns; first += Team::kSize * kPack) body(first);
}

// A lane's packs of up to kPacks * kColumnsOfPacks columns of a warp's row, which has whole packs and begins at a multiple of 16 bytes. All
// loads are under way before one of them is waited for.
inline constexpr int64_t kColumnsOfPacks = int64_t{kWarp} * kPack;
__device__ inline int64_t column_of_lane(unsigned p) { return p * kColumnsOfPacks + lane() * kPack; }
template <class T, unsigned kPacks>
struct PacksOfLane {
  PackInMemory<T> at[kPacks];

  // Zeros behind the end.
  __device__ PacksOfLane(const T* row, int64_t columns) : at{} {
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kPacks; ++p) {
      if (column_of_lane(p) < columns) at[p] = load<PackInMemory<T>>(row + column_of_lane(p));
    }
  }
};

}  // namespace mantissa::gpu
