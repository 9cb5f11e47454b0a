// Hashes of quantised tensors that do not depend on how the tensor is divided into shards.
#pragma once

#include <cstdint>
#include <span>

#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Sums mod 2^64 of xxh64 over cells of 32 x 32 elements (one block where a block is larger, in either direction; the last cell of a row or
// column may be short; of a stack whose matrices are not whole cells, of gcd(32, rows of a matrix) rows, so that none lies in two). A cell
// is its code bytes by row, then its scale bytes by row; for `values` the fp32 values that they stand for, by row. Its seed is (row of
// cells) * (cells in a row) + (column of cells) of the whole tensor, so the sums of shards add up to its sums.
struct CodeSums {
  uint64_t codes = 0, values = 0;

  CodeSums& operator+=(const CodeSums& other) {
    codes += other.codes;
    values += other.values;
    return *this;
  }
  bool operator==(const CodeSums&) const = default;
};

// Where a shard lies in the whole tensor. Its rows from `rows` on are not counted (padding); first_row and first_col are borders of cells.
// Throws Error(internal) otherwise, if the shard has fewer rows, or if a cell is not whole blocks (those of 24, say).
struct CodePlace {
  int64_t rows;
  int64_t columns;  // of the whole tensor
  int64_t first_row = 0, first_col = 0;
  int64_t matrix_rows = 0;  // of each matrix of a stack, the whole tensor being [E * matrix_rows, columns]; 0: of no stack
};
CodeSums code_sums(const QuantizedTensor& shard, const CodePlace& place);

// The same by matrix: adds to sums[i] what the shard holds of matrix i of the stack, and without one all to sums[0]. What was added to all
// of them is code_sums().
void add_code_sums(const QuantizedTensor& shard, const CodePlace& place, std::span<CodeSums> sums);

}  // namespace mantissa
