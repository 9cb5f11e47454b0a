#include "backend/cpu/pack_block.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/clones.h"
#include "backend/cpu/simd.h"

namespace mantissa {
namespace {

using simd::Floats;
using Halves = uint16_t __attribute__((vector_size(16)));

[[gnu::always_inline]] inline void widen_row(const bf16* from, float* to, int64_t n) {
  simd::for_lanes(
      n, [&](int64_t j, auto part) __attribute__((always_inline)) { simd::store(to + j, simd::load(from + j, part), part); });
}

template <class T>
struct Lanes {};
template <>
struct Lanes<float> {
  using Vector = Floats;
  using Unaligned = simd::detail::AnyFloats;
};
template <>
struct Lanes<bf16> {
  using Vector = Halves;
  using Unaligned = simd::detail::AnyHalfWords;
};

// Eight vectors of eight lanes as columns: pairs, then pairs of pairs, then halves.
[[gnu::always_inline]] inline void transpose8(Floats (&r)[8]) {
  Floats t[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Floats u[8];
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = __builtin_shufflevector(t[4 * i + j], t[4 * i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
      u[4 * i + 2 * j + 1] = __builtin_shufflevector(t[4 * i + j], t[4 * i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(u[i], u[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
    r[4 + i] = __builtin_shufflevector(u[i], u[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// The same by three perfect shuffles.
[[gnu::always_inline]] inline void transpose8(Halves (&r)[8]) {
  for (int stage = 0; stage < 3; ++stage) {
    Halves t[8];
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = __builtin_shufflevector(r[i], r[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }
}

// to[j * to_ld + i] = from[i * from_ld + j] for rows x cols elements of `from`. Eight rows at a time, so that rows at a distance of a power
// of two do not drive each other out of the cache.
template <class T>
[[gnu::always_inline]] inline void transpose(const T* from, int64_t from_ld, int64_t rows, int64_t cols, T* to, int64_t to_ld) {
  using Unaligned = typename Lanes<T>::Unaligned;
  const int64_t whole_rows = rows / 8 * 8, whole_cols = cols / 8 * 8;
  for (int64_t i = 0; i < whole_rows; i += 8) {
    for (int64_t j = 0; j < whole_cols; j += 8) {
      typename Lanes<T>::Vector block[8];
      for (int r = 0; r < 8; ++r) block[r] = *reinterpret_cast<const Unaligned*>(from + (i + r) * from_ld + j);
      transpose8(block);
      for (int r = 0; r < 8; ++r) *reinterpret_cast<Unaligned*>(to + (j + r) * to_ld + i) = block[r];
    }
    for (int64_t j = whole_cols; j < cols; ++j) {
      for (int r = 0; r < 8; ++r) to[j * to_ld + i + r] = from[(i + r) * from_ld + j];
    }
  }
  for (int64_t i = whole_rows; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) to[j * to_ld + i] = from[i * from_ld + j];
  }
}

// The rows of the block as they are stored.
void copy_rows(const Block& from, const TileLayout& tile, std::byte* to) {
  for (int64_t i = 0; i < from.rows; ++i) {
    const std::byte* row = from.data + i * from.ld * dtype_bytes(from.dtype);
    std::byte* out = to + i * tile.ld * dtype_bytes(tile.dtype);
    if (from.dtype == tile.dtype) {
      std::memcpy(out, row, static_cast<size_t>(from.cols * dtype_bytes(tile.dtype)));
    } else {
      cloned<widen_row>(reinterpret_cast<const bf16*>(row), reinterpret_cast<float*>(out), from.cols);
    }
  }
}

void transpose_block(const Block& from, const TileLayout& tile, std::byte* to) {
  if (from.dtype == Dtype::bf16) {
    cloned<transpose<bf16>>(reinterpret_cast<const bf16*>(from.data), from.ld, from.cols, from.rows, reinterpret_cast<bf16*>(to), tile.ld);
  } else {
    cloned<transpose<float>>(reinterpret_cast<const float*>(from.data), from.ld, from.cols, from.rows, reinterpret_cast<float*>(to),
                             tile.ld);
  }
}

// Transposed as bf16, then widened.
void widen_transposed(const Block& from, const TileLayout& tile, std::byte* to) {
  alignas(64) thread_local bf16 narrow[size_t{128} * 128];
  constexpr int64_t kStep = 128;
  for (int64_t i = 0; i < from.rows; i += kStep) {
    for (int64_t j = 0; j < from.cols; j += kStep) {
      const Block part = from.part(i, j, kStep, kStep);
      auto* const bytes = reinterpret_cast<std::byte*>(narrow);
      transpose_block(part, {.dtype = Dtype::bf16, .rows = kStep, .cols = kStep, .ld = kStep}, bytes);
      copy_rows({.data = bytes, .dtype = Dtype::bf16, .ld = kStep, .rows = part.rows, .cols = part.cols, .transposed = false}, tile,
                to + (i * tile.ld + j) * dtype_bytes(tile.dtype));
    }
  }
}

}  // namespace

Block Block::part(int64_t row, int64_t col, int64_t most_rows, int64_t most_cols) const {
  const int64_t element = transposed ? col * ld + row : row * ld + col;
  return {.data = data + element * dtype_bytes(dtype),
          .dtype = dtype,
          .ld = ld,
          .rows = std::min(most_rows, rows - row),
          .cols = std::min(most_cols, cols - col),
          .transposed = transposed};
}

void pack_block(const Block& from, const TileLayout& tile, std::byte* to) {
  if (!from.transposed) {
    copy_rows(from, tile, to);
  } else if (from.dtype == tile.dtype) {
    transpose_block(from, tile, to);
  } else {
    widen_transposed(from, tile, to);
  }
  const int64_t element = dtype_bytes(tile.dtype);
  const auto clear = [&](int64_t row, int64_t col) {
    std::memset(to + (row * tile.ld + col) * element, 0, static_cast<size_t>((tile.cols - col) * element));
  };
  for (int64_t i = 0; i < from.rows && from.cols < tile.cols; ++i) clear(i, from.cols);
  for (int64_t i = from.rows; i < tile.rows; ++i) clear(i, 0);
}

}  // namespace mantissa
