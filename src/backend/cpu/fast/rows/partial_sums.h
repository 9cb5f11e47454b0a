// Column sums over the rows of a matrix: weight gradients of norms, bias gradients. Every piece of rows leaves its own sums, and these are
// added in the order of the rows, so the result does not depend on the number of threads.
#pragma once

#include <memory>

#include "mantissa/backend/backend.h"

namespace mantissa {

class PartialSums {
 public:
  // Makes room for `rows` rows that leave `columns` sums each; `work` elements are read in a row.
  PartialSums(Backend& device, int64_t rows, int64_t columns, int64_t work);

  // Rows of a piece, for parallel_for.
  int64_t rows_per_piece() const { return rows_per_piece_; }

  // The sums of the piece that starts at row `begin`, set to zero.
  float* start(int64_t begin);

  // out (+)= columns [first, first + out.elements()) of all pieces, to be called after the last piece.
  void write(const Tensor& out, bool accumulate, int64_t first = 0) const;

 private:
  int64_t columns_, rows_per_piece_, pieces_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace mantissa
