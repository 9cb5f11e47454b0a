// Rows that threads go through eight elements at a time, by 16 bytes where they can. Which elements a thread has, and so the order of a
// sum, does not depend on where the rows begin.
#pragma once

#include "backend/cuda/rows/reduce.h"
#include "backend/cuda/values.h"
#include "gpu/runtime.h"

namespace mantissa::gpu {

inline constexpr unsigned kPack = 8;  // elements

struct alignas(16) Pack {
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
// Rounds a pack, NaN to any NaN: the instruction rounds two numbers as to_bf16() does, but gives another one.
template <class T>
__device__ inline PackInMemory<T> rounded_pack(const Pack& pack) {
  return __builtin_bit_cast(PackInMemory<T>, pack);
}
template <>
__device__ inline PackInMemory<bf16> rounded_pack<bf16>(const Pack& pack) {
  PackInMemory<bf16> out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; i += 2) out.words[i / 2] = pack_bf16(pack.at[i], pack.at[i + 1]);
  return out;
}
// Writes a rounded pack to global memory, at a multiple of 16 bytes.
template <class T>
__device__ inline void store_rounded(T* to, const Pack& pack) {
  store_wide(to, rounded_pack<T>(pack));
}
template <>
__device__ inline void store_rounded<bf16>(bf16* to, const Pack& pack) {
  const PackInMemory<bf16> out = rounded_pack<bf16>(pack);  // also where it is not written: nvcc makes less code of that
  bool numbers = true;
  MANTISSA_UNROLL
  for (const float value : pack.at) numbers = numbers && value == value;
  if (numbers) return store_wide(to, out);
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) to[i] = to_bf16(pack.at[i]);
}
__device__ inline Pack sum_of(const Pack& a, const Pack& b) {
  Pack out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) out.at[i] = a.at[i] + b.at[i];
  return out;
}

// `count` elements from `values` on. aligned: they begin at a multiple of 16 bytes. kWhole: so they do, and are whole packs.
template <class T, bool kWhole = false>
struct Packs {
  T* values;
  int64_t count;
  bool aligned;

  // Row i of a matrix of which these are row 0.
  __device__ Packs row(int64_t i) const { return {values + i * count, count, aligned}; }
  // Reads a pack, with zeros behind the end.
  __device__ Pack read(int64_t first) const {
    const auto whole = [&] { return values_of(load<PackInMemory<std::remove_const_t<T>>>(values + first)); };
    if constexpr (kWhole) {
      return whole();
    } else {
      if (aligned && first + kPack <= count) return whole();
      Pack out;
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) out.at[i] = first + i < count ? value_of(values[first + i]) : 0.0F;
      return out;
    }
  }
  // Reads a pack of what no thread of the launch writes.
  __device__ Pack read_constant(int64_t first) const {
    if constexpr (kWhole) return values_of(load_constant<PackInMemory<std::remove_const_t<T>>>(values + first));
    return read(first);
  }
  // Writes a rounded pack, but nothing behind the end.
  __device__ void write(int64_t first, const Pack& pack) const {
    if (kWhole || (aligned && first + kPack <= count)) {
      store_rounded(values + first, pack);
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

// Calls body.operator()<Team, kWhole>(grid) like with_team(), kWhole being `whole`; rows that are not whole have blocks.
template <class Body>
void with_rows(int64_t rows, int64_t columns, bool whole, Body&& body) {
  if (!whole) return body.template operator()<OfBlock, false>(Grid{rows, kThreads});
  with_team(rows, columns, [&]<class Team>(Grid grid) { body.template operator()<Team, true>(grid); });
}

// Calls body(first) for the packs of a row that belong to this thread of its team.
template <class Team, class Body>
__device__ inline void for_each_pack_of_row(int64_t columns, Body body) {
  for (int64_t first = Team::rank() * kPack; first < columns; first += Team::kSize * kPack) body(first);
}

// A thread's packs of up to kPacks * kSize * kPack columns of its team's row, which has whole packs and begins at a multiple of 16 bytes.
// All loads are under way before one of them is waited for.
template <class Team, unsigned kPacks, class T>
struct HeldPacks {
  PackInMemory<T> at[kPacks];

  // Zeros behind the end.
  __device__ HeldPacks(const T* row, unsigned columns) : at{} {
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kPacks; ++p) {
      if (column(p) < columns) at[p] = load<PackInMemory<T>>(row + column(p));
    }
  }
  __device__ static unsigned column(unsigned p) { return (p * Team::kSize + Team::rank()) * kPack; }
};

// Calls body(first, pack) for the packs of a thread of a row that is read again each time, or that its threads hold.
template <class Team, class T, bool kWhole>
struct AnyRow {
  Packs<const T, kWhole> row;

  template <class Body>
  __device__ void for_each(Body body) const {
    for_each_pack_of_row<Team>(row.count, [&](int64_t first) { body(first, row.read(first)); });
  }
};
template <class Team, unsigned kPacks, class T>
struct HeldRow {
  unsigned columns;
  HeldPacks<Team, kPacks, T> held;

  __device__ explicit HeldRow(const Packs<const T, true>& row) : columns(static_cast<unsigned>(row.count)), held(row.values, columns) {}
  // Adds another row, rounds, and writes the sums.
  __device__ void add(const T* other, T* sums) {
    constexpr unsigned kAtOnce = kPacks < 4 ? kPacks : 4;  // packs of the other row, for which there are registers
    MANTISSA_UNROLL
    for (unsigned first = 0; first < kPacks; first += kAtOnce) {
      const unsigned begin = first * Team::kSize * kPack;
      const HeldPacks<Team, kAtOnce, T> more(other + begin, columns < begin ? 0 : columns - begin);
      MANTISSA_UNROLL
      for (unsigned p = first; p < first + kAtOnce; ++p) {
        const Pack sum = sum_of(values_of(held.at[p]), values_of(more.at[p - first]));
        held.at[p] = rounded_pack<T>(sum);
        if (held.column(p) < columns) store_rounded(sums + held.column(p), sum);
      }
    }
  }
  template <class Body>
  __device__ void for_each(Body body) const {
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kPacks; ++p) {
      if (held.column(p) < columns) body(held.column(p), values_of(held.at[p]));
    }
  }
};
// kPacks: 0 or those of a HeldRow.
template <class Team, unsigned kPacks, class T>
using TeamRow = std::conditional_t<kPacks != 0, HeldRow<Team, kPacks != 0 ? kPacks : 1, T>, AnyRow<Team, T, false>>;

// Calls body.operator()<Team, kPacks>(grid) with the TeamRow for rows of so many columns.
inline constexpr unsigned kPacksOfLongRow = 4;
inline bool holds_row(int64_t columns) { return columns % kPack == 0 && columns <= kPacksOfLongRow * OfBlock::kSize * kPack; }
template <class Body>
void with_held_rows(int64_t rows, int64_t columns, Body&& body) {
  const Grid of_warps{ceil_div(rows, int64_t{OfWarp::kRowsOfBlock}), kThreads}, of_blocks{rows, kThreads};
  if (!holds_row(columns)) return body.template operator()<OfBlock, 0>(of_blocks);
  if (columns > kColumnsOfWarp) return body.template operator()<OfBlock, kPacksOfLongRow>(of_blocks);
  const auto fits = [&]<unsigned kPacks>() {
    const bool found = columns <= kPacks * OfWarp::kSize * kPack;
    if (found) body.template operator()<OfWarp, kPacks>(of_warps);
    return found;
  };
  fits.template operator()<1>() || fits.template operator()<2>() || fits.template operator()<3>() || fits.template operator()<4>() ||
      fits.template operator()<8>() || fits.template operator()<16>();
}

inline constexpr int64_t kColumnsOfPacks = int64_t{kWarp} * kPack;
__device__ inline unsigned column_of_lane(unsigned p) { return HeldPacks<OfWarp, 1, float>::column(p); }

// Packs of a thread of map().
inline constexpr unsigned kPacksOfThread = 2, kElementsOfMap = kPacksOfThread * kThreads * kPack;

template <class F, class... Operands>
__device__ inline Pack pack_of(const F& f, const Operands&... operands) {
  Pack out;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) out.at[i] = f(operands.at[i]...);
  return out;
}
template <class F, class To, class... From>
__device__ inline void store_map(const F& f, To* out, const HeldPacks<OfBlock, kPacksOfThread, From>&... in) {
  MANTISSA_UNROLL
  for (unsigned p = 0; p < kPacksOfThread; ++p)
    store_rounded(out + HeldPacks<OfBlock, 1, To>::column(p), pack_of(f, values_of(in.at[p])...));
}

// out[i] = f(in[i]...) for all i, in a grid of grid_of_map(). out may be one of the others.
template <class F, class To, class... From>
__global__ void __launch_bounds__(kThreads) map(F f, Packs<To> out, Packs<const From>... in) {
  const int64_t first = block() * kElementsOfMap, end = first + kElementsOfMap;
  if ((out.aligned && ... && in.aligned) && end <= out.count)
    return store_map(f, out.values + first, HeldPacks<OfBlock, kPacksOfThread, From>(in.values + first, kElementsOfMap)...);
  for (int64_t at = first + thread() * kPack; at < end && at < out.count; at += kThreads * kPack) out.write(at, pack_of(f, in.read(at)...));
}
inline Grid grid_of_map(int64_t count) { return {ceil_div(count, int64_t{kElementsOfMap}), kThreads}; }

}  // namespace mantissa::gpu
