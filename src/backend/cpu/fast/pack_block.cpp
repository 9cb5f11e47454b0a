#include "backend/cpu/fast/pack_block.h"

#include <algorithm>
#include <cstring>

#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/simd.h"

namespace mantissa {
namespace {

using simd::Floats;
using Halves = uint16_t __attribute__((vector_size(32)));

constexpr int64_t kCacheLine = 64;

[[gnu::always_inline]] inline void widen_row(const bf16* from, float* to, int64_t n) {
  simd::for_lanes(
      n, [&](int64_t j, auto part) __attribute__((always_inline)) { simd::store(to + j, simd::load(from + j, part), part); });
}

// The unit of transposition: `kRows` rows of eight elements become eight vectors of `kRows` lanes. Memory of any alignment.
template <class T>
struct Lanes {};
template <>
struct Lanes<float> {
  using Vector = Floats;
  using Stored = float __attribute__((vector_size(32), aligned(2), may_alias));
  static constexpr int kRows = 8;
  [[gnu::always_inline]] static Vector load(const std::byte* from, int64_t stride, int row) {
    return *reinterpret_cast<const Stored*>(from + row * stride);
  }
};
template <>
struct Lanes<bf16> {
  using Vector = Halves;
  using Stored = uint16_t __attribute__((vector_size(32), aligned(2), may_alias));
  static constexpr int kRows = 16;
  // Loads row r beside row r + 8.
  [[gnu::always_inline]] static Vector load(const std::byte* from, int64_t stride, int row) {
    using simd::detail::AnyHalfWords;
    const auto low = *reinterpret_cast<const AnyHalfWords*>(from + row * stride);
    const auto high = *reinterpret_cast<const AnyHalfWords*>(from + (row + 8) * stride);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
};

// Transposes eight vectors of eight lanes: pairs, then pairs of pairs, then halves.
[[gnu::always_inline]] inline void transpose8(Floats (&r)[8]) {
  Floats t[8];
  for (int64_t i = 0; i < 4; ++i) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  Floats u[8];
  for (int64_t i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = __builtin_shufflevector(t[4 * i + j], t[4 * i + 2 + j], 0, 1, 8, 9, 4, 5, 12, 13);
      u[4 * i + 2 * j + 1] = __builtin_shufflevector(t[4 * i + j], t[4 * i + 2 + j], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int64_t i = 0; i < 4; ++i) {
    r[i] = __builtin_shufflevector(u[i], u[4 + i], 0, 1, 2, 3, 8, 9, 10, 11);
    r[4 + i] = __builtin_shufflevector(u[i], u[4 + i], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Like transpose8() above, but for each half of eight vectors, by three perfect shuffles.
[[gnu::always_inline]] inline void transpose8(Halves (&r)[8]) {
  for (int stage = 0; stage < 3; ++stage) {
    Halves t[8];
    for (int64_t i = 0; i < 4; ++i) {
      t[2 * i] = __builtin_shufflevector(r[i], r[i + 4], 0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27);
      t[2 * i + 1] = __builtin_shufflevector(r[i], r[i + 4], 4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31);
    }
    for (int64_t i = 0; i < 8; ++i) r[i] = t[i];
  }
}

struct Matrix {
  const std::byte* data;
  int64_t stride;  // bytes from one row to the next
  int64_t rows, cols;
};

// to[j * to_ld + i] = element (i, j) of `from`. It takes a few rows at a time, so that rows at a distance of a power of two do not drive
// each other out of the cache.
template <class T>
[[gnu::always_inline]] inline void transpose(const Matrix& from, T* to, int64_t to_ld) {
  constexpr int64_t kSize = sizeof(T);
  constexpr int kRows = Lanes<T>::kRows;
  const int64_t whole_rows = from.rows / kRows * kRows, whole_cols = from.cols / 8 * 8;
  const auto copy = [&](int64_t i, int64_t j) __attribute__((always_inline)) {
    std::memcpy(to + j * to_ld + i, from.data + i * from.stride + j * kSize, kSize);
  };
  for (int64_t i = 0; i < whole_rows; i += kRows) {
    for (int64_t j = 0; j < whole_cols; j += 8) {
      if (j * kSize % kCacheLine == 0) {  // rows are too short for the hardware to see the next ones coming
        for (int64_t r = i + kRows; r < std::min(i + 2 * kRows, from.rows); ++r)
          __builtin_prefetch(from.data + r * from.stride + j * kSize);
      }
      typename Lanes<T>::Vector block[8];
      for (int r = 0; r < 8; ++r) block[r] = Lanes<T>::load(from.data + i * from.stride + j * kSize, from.stride, r);
      transpose8(block);
      for (int r = 0; r < 8; ++r) *reinterpret_cast<typename Lanes<T>::Stored*>(to + (j + r) * to_ld + i) = block[r];
    }
    for (int64_t j = whole_cols; j < from.cols; ++j) {
      for (int r = 0; r < kRows; ++r) copy(i + r, j);
    }
  }
  for (int64_t i = whole_rows; i < from.rows; ++i) {
    for (int64_t j = 0; j < from.cols; ++j) copy(i, j);
  }
}

// to[2 * j] = low[j], to[2 * j + 1] = high[j].
[[gnu::always_inline]] inline void interleave(const bf16* low, const bf16* high, bf16* to, int64_t n) {
  using Stored = Lanes<bf16>::Stored;
  constexpr int64_t kWidth = 16;
  const int64_t whole = n / kWidth * kWidth;
  for (int64_t j = 0; j < whole; j += kWidth) {
    const Halves a = *reinterpret_cast<const Stored*>(low + j), b = *reinterpret_cast<const Stored*>(high + j);
    auto* const out = reinterpret_cast<Stored*>(to + 2 * j);
    out[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    out[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
  for (int64_t j = whole; j < n; ++j) to[2 * j] = low[j], to[2 * j + 1] = high[j];
}

// Copies the rows of the block as they are stored.
void copy_rows(const Block& from, const TileLayout& tile, std::byte* to) {
  const int64_t from_row = from.ld * dtype_bytes(from.dtype), to_row = tile.ld * dtype_bytes(tile.dtype);
  const auto row_bytes = static_cast<size_t>(from.cols * dtype_bytes(tile.dtype));
  for (int64_t i = 0; i < from.rows; ++i) {
    const std::byte* row = from.data + i * from_row;
    std::byte* out = to + i * to_row;
    if (from.dtype == tile.dtype) {
      std::memcpy(out, row, row_bytes);
    } else {
      cloned<widen_row>(reinterpret_cast<const bf16*>(row), reinterpret_cast<float*>(out), from.cols);
    }
  }
}

// The memory of a transposed block.
Matrix stored(const Block& from) {
  return {.data = from.data, .stride = from.ld * dtype_bytes(from.dtype), .rows = from.cols, .cols = from.rows};
}

void transpose_block(const Block& from, const TileLayout& tile, std::byte* to) {
  if (from.dtype == Dtype::bf16) {
    cloned<transpose<bf16>>(stored(from), reinterpret_cast<bf16*>(to), tile.ld);
  } else {
    cloned<transpose<float>>(stored(from), reinterpret_cast<float*>(to), tile.ld);
  }
}

// Transposes as bf16, then widens.
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

// Writes rows 2i and 2i + 1 of a bf16 block, element by element, at to + 2 * i * ld. A row of zeros follows the last one of an odd number.
void pack_pairs(const Block& from, int64_t ld, bf16* to) {
  const int64_t pairs = from.rows / 2;
  const auto* data = reinterpret_cast<const bf16*>(from.data);
  if (from.transposed) {  // a pair is one element of four bytes
    Matrix elements = stored(from);
    elements.cols = pairs;
    cloned<transpose<float>>(elements, reinterpret_cast<float*>(to), ld);
  } else {
    for (int64_t i = 0; i < pairs; ++i) {
      cloned<interleave>(data + 2 * i * from.ld, data + (2 * i + 1) * from.ld, to + 2 * i * ld, from.cols);
    }
  }
  if (from.rows % 2 == 0) return;
  const int64_t last = from.rows - 1;
  for (int64_t j = 0; j < from.cols; ++j) {
    to[last * ld + 2 * j] = data[from.transposed ? j * from.ld + last : last * from.ld + j];
    to[last * ld + 2 * j + 1] = {};
  }
}

// Writes zeros behind the first elements, `filled_rows` x `filled_cols`, of a tile that is stored row by row.
void clear(const TileLayout& tile, int64_t filled_rows, int64_t filled_cols, std::byte* to) {
  const int64_t element = dtype_bytes(tile.dtype);
  const auto clear_row = [&](int64_t row, int64_t col) {
    std::memset(to + (row * tile.ld + col) * element, 0, static_cast<size_t>((tile.cols - col) * element));
  };
  for (int64_t i = 0; i < filled_rows && filled_cols < tile.cols; ++i) clear_row(i, filled_cols);
  for (int64_t i = filled_rows; i < tile.rows; ++i) clear_row(i, 0);
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
  clear(tile, from.rows, from.cols, to);
}

void pack_panels(const Block& from, const PanelLayout& tile, std::byte* to) {
  const int64_t panel_bytes = tile.rows * tile.ld * dtype_bytes(tile.dtype);
  for (int64_t first = 0; first < tile.cols; first += tile.panel, to += panel_bytes) {
    const Block part = from.part(0, std::min(first, from.cols), from.rows, tile.panel);
    if (tile.pairs) {
      pack_pairs(part, tile.ld, reinterpret_cast<bf16*>(to));
      // Two rows of the tile are one of twice the length.
      clear({.dtype = tile.dtype, .rows = tile.rows / 2, .cols = 2 * tile.panel, .ld = 2 * tile.ld}, (part.rows + 1) / 2, 2 * part.cols,
            to);
    } else {
      pack_block(part, {.dtype = tile.dtype, .rows = tile.rows, .cols = tile.panel, .ld = tile.ld}, to);
    }
  }
}

}  // namespace mantissa
