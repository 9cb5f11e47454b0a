// Hashes quantized tensors independently of how they are divided into shards.
#pragma once

#include <cstdint>
#include <span>

#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// Sums of xxh64 mod 2^64 over cells of 32 x 32 elements, or one block where a block is larger in either direction; the last cell of a row
// or column may be short. Where the matrices of a grouped weight are not whole cells, a cell has gcd(32, rows of a matrix) rows, so that
// none lies in two matrices. A cell is hashed as its code bytes by row, then its scale bytes by row; for `values` as the fp32 values that
// they stand for, by row. Its seed is (row of cells) * (cells in a row) + (column of cells) of the whole tensor, so the sums of shards add
// up to its sums.
struct CodeSums {
  uint64_t codes = 0, values = 0;

  CodeSums& operator+=(const CodeSums& other) {
    codes += other.codes;
    values += other.values;
    return *this;
  }
  bool operator==(const CodeSums&) const = default;
};

// Locates a shard in the whole tensor. Rows from `rows` on are not counted (padding); first_row and first_col must be boundaries of cells.
// Throws Error(internal) otherwise, if the shard has fewer rows, or if a cell is not whole blocks (those of 24, say).
struct CodePlace {
  int64_t rows;
  int64_t columns;  // width of the whole tensor
  int64_t first_row = 0, first_col = 0;
  int64_t matrix_rows = 0;  // rows of each matrix of a grouped weight [E * matrix_rows, columns]; 0: it is not grouped
};
CodeSums code_sums(const QuantizedTensor& shard, const CodePlace& place);

// Hashes by matrix: adds to sums[i] what the shard holds of matrix i of a grouped weight, or everything to sums[0] without one. The sums
// together equal code_sums().
void add_code_sums(const QuantizedTensor& shard, const CodePlace& place, std::span<CodeSums> sums);

}  // namespace mantissa
