// How parts of matrices are laid out anew as tiles: row by row, or transposed, bf16 widened where the tile is fp32, zeros behind.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

// A matrix of fp32 or bf16 in memory, or a part of one: element (i, j) lies at data[i * ld + j], if transposed at data[j * ld + i].
struct Block {
  const std::byte* data;
  Dtype dtype;
  int64_t ld;
  int64_t rows, cols;
  bool transposed;

  // From element (row, col) on, at most so many.
  Block part(int64_t row, int64_t col, int64_t most_rows, int64_t most_cols) const;
  // The same memory the other way round.
  Block flipped() const { return {.data = data, .dtype = dtype, .ld = ld, .rows = cols, .cols = rows, .transposed = !transposed}; }
};

struct TileLayout {
  Dtype dtype;
  int64_t rows, cols, ld;
};

// to[i * ld + j] = element (i, j) of the block, which is at most as large as the tile; zero where the block has none. What is behind `cols`
// in a row is left alone.
void pack_block(const Block& from, const TileLayout& tile, std::byte* to);

}  // namespace mantissa
