#include "mantissa/precision/code_hash.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "mantissa/backend/functions.h"
#include "mantissa/base/hash.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Views the bytes of a row-major matrix.
struct Bytes {
  std::span<const std::byte> all;
  size_t row;  // in one row

  void append_to(std::vector<std::byte>& cell, size_t begin, size_t end, size_t first, size_t last) const {
    for (size_t i = begin; i < end; ++i) {
      const auto part = all.subspan(i * row + first, last - first);
      cell.insert(cell.end(), part.begin(), part.end());
    }
  }
};

size_t place(int64_t index) { return static_cast<size_t>(index); }

// Holds a row block of a shard in host memory.
class RowBlock {
 public:
  RowBlock(const QuantizedTensor& codes, int64_t cell_rows, int64_t cell_cols)
      : how_(codes.how),
        shape_(codes.shape),
        cell_rows_(cell_rows),
        cell_cols_(cell_cols),
        code_bytes_(codes.codes),
        scale_bytes_(codes.scales),
        decoded_(decoded(codes, Dtype::f32)),
        value_bytes_(decoded_),
        codes_{code_bytes_.get(), place(codes.codes.dim(1))},
        scales_{scale_bytes_.get(), place(codes.scales.dim(1))},
        values_{value_bytes_.get(), place(codes.shape[1]) * sizeof(float)} {}

  // Hashes row number i of cells, of which `rows` rows count; the first cell has this seed.
  CodeSums sums(int64_t i, int64_t rows, uint64_t seed) const {
    CodeSums sums;
    std::vector<std::byte> cell;
    const int64_t begin = i * cell_rows_, end = std::min(begin + cell_rows_, rows);
    for (int64_t first = 0; first < shape_[1]; first += cell_cols_, ++seed) {
      const int64_t last = std::min(first + cell_cols_, shape_[1]);
      sums += of_cell(cell, begin, end, first, last, seed);
    }
    return sums;
  }

 private:
  CodeSums of_cell(std::vector<std::byte>& cell, int64_t begin, int64_t end, int64_t first, int64_t last, uint64_t seed) const {
    const int64_t elements_per_byte = shape_[1] / static_cast<int64_t>(codes_.row);
    cell.clear();
    codes_.append_to(cell, place(begin), place(end), place(first / elements_per_byte), place(last / elements_per_byte));
    scales_.append_to(cell, place(begin / how_.block_rows), place(ceil_div(end, how_.block_rows)), place(first / how_.block_cols),
                      place(last / how_.block_cols));
    CodeSums sums{.codes = xxh64(cell, seed).value};
    cell.clear();
    values_.append_to(cell, place(begin), place(end), place(first) * sizeof(float), place(last) * sizeof(float));
    sums.values = xxh64(cell, seed).value;
    return sums;
  }

  Quantization how_;
  Shape shape_;
  int64_t cell_rows_, cell_cols_;
  HostBytes code_bytes_, scale_bytes_;
  Tensor decoded_;
  HostBytes value_bytes_;
  Bytes codes_, scales_, values_;
};

}  // namespace

CodeSums code_sums(const QuantizedTensor& shard, const CodePlace& place) {
  const int64_t matrices = place.matrix_rows > 0 ? ceil_div(place.first_row + place.rows, place.matrix_rows) : 1;
  std::vector<CodeSums> sums(static_cast<size_t>(matrices));
  add_code_sums(shard, place, sums);
  return std::reduce(sums.begin(), sums.end(), CodeSums(), [](CodeSums a, const CodeSums& b) { return a += b; });
}

void add_code_sums(const QuantizedTensor& shard, const CodePlace& place, std::span<CodeSums> sums) {
  constexpr int64_t kRowBlockElements = 1 << 20;
  const int64_t whole_cell = std::max<int64_t>(32, shard.how.block_rows), cell_cols = std::max<int64_t>(32, shard.how.block_cols);
  const int64_t cell_rows = std::gcd(whole_cell, place.matrix_rows);
  require(cell_rows % shard.how.block_rows == 0 && cell_cols % shard.how.block_cols == 0, "code_sums: the blocks of ", shard.how,
          " do not divide a cell of ", cell_rows, " x ", cell_cols);
  require(place.rows <= shard.shape[0], "code_sums: ", place.rows, " rows of a shard that is ", shard.shape);
  require(place.first_row % cell_rows == 0 && place.first_col % cell_cols == 0, "code_sums: a shard at ", place.first_row, ", ",
          place.first_col, " begins inside a cell of ", shard.how);
  const int64_t cells_per_row = ceil_div(place.columns, cell_cols),
                row_block = round_up(ceil_div(kRowBlockElements, shard.shape[1]), cell_rows);
  const int64_t cells_per_matrix = place.matrix_rows > 0 ? place.matrix_rows / cell_rows : std::numeric_limits<int64_t>::max();
  for (int64_t begin = 0; begin < place.rows; begin += row_block) {
    const RowBlock rows(slice(shard, begin, std::min(begin + row_block, shard.shape[0])), cell_rows, cell_cols);
    const int64_t count = ceil_div(std::min(row_block, place.rows - begin), cell_rows), first_cell = (place.first_row + begin) / cell_rows;
    std::vector<CodeSums> parts(static_cast<size_t>(count));
    parallel_for(count, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t seed = (first_cell + i) * cells_per_row + place.first_col / cell_cols;
        parts[static_cast<size_t>(i)] = rows.sums(i, place.rows - begin, static_cast<uint64_t>(seed));
      }
    });
    for (int64_t i = 0; i < count; ++i) sums[static_cast<size_t>((first_cell + i) / cells_per_matrix)] += parts[static_cast<size_t>(i)];
  }
}

}  // namespace mantissa
