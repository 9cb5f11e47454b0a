// Copies blocks of matrices into tiles: row by row or in panels, transposed, bf16 widened where the tile is fp32, zeros behind.
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

  // Returns the part that begins at element (row, col), of at most so many rows and columns.
  Block part(int64_t row, int64_t col, int64_t most_rows, int64_t most_cols) const;
};

struct TileLayout {
  Dtype dtype;
  int64_t rows, cols, ld;
};

// to[i * ld + j] = element (i, j) of the block, which is at most as large as the tile; zero where the block has none. Elements behind
// `cols` in a row are left alone.
void pack_block(const Block& from, const TileLayout& tile, std::byte* to);

// A tile as panels of `panel` columns, which divide `cols`, one behind the other. In a panel a row follows `ld` elements behind the one
// before; with `pairs`, which need bf16 and an even number of rows, elements (2i, j) and (2i + 1, j) lie side by side, as instructions that
// sum two products take them:
//   to[(j / panel) * rows * ld + i * ld + j % panel], with pairs [(j / panel) * rows * ld + (i / 2) * 2 * ld + 2 * (j % panel) + i % 2]
struct PanelLayout {
  Dtype dtype;
  int64_t rows, cols, panel, ld;
  bool pairs;

  int64_t bytes() const { return cols / panel * rows * ld * dtype_bytes(dtype); }
};

// Like pack_block(), but into panels.
void pack_panels(const Block& from, const PanelLayout& tile, std::byte* to);

}  // namespace mantissa
