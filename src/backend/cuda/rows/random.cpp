// RandomNormal is drawn by the CPU backend, because no chip has the logarithm and the cosine of the C library to the bit.
#include <algorithm>

#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

constexpr int64_t kPieceElements = int64_t{4} << 20;  // elements of a large tensor that the host holds at a time

}  // namespace

void CudaBackend::execute(const RandomNormal& k) {
  const int64_t elements = k.out.elements();
  if (elements == 0) return;
  const bool whole_rows = k.row_stride == 0 || k.out.shape().rank() == 0 || k.row_stride == k.out.shape()[-1];
  const int64_t columns = whole_rows ? elements : k.out.shape()[-1];
  const Tensor out = k.out.view({elements});
  const auto draw = [&](int64_t first, int64_t rows, int64_t width) {  // from element `first` of out on
    const Tensor drawn = empty(*host_, out.dtype(), {rows, width});
    const int64_t index = k.first_index + (whole_rows ? first : first / columns * k.row_stride + first % columns);
    host_->run(RandomNormal{
        .out = drawn, .key = k.key, .what = k.what, .first_index = index, .std = k.std, .row_stride = rows == 1 ? 0 : k.row_stride});
    upload(drawn.device_bytes(), out.slice(first, first + rows * width));
  };
  if (columns < kPieceElements && !whole_rows) {
    const int64_t rows = kPieceElements / columns;
    for (int64_t at = 0; at < elements; at += rows * columns) draw(at, std::min(rows, (elements - at) / columns), columns);
    return;
  }
  for (int64_t row = 0; row < elements; row += columns) {
    for (int64_t at = 0; at < columns; at += kPieceElements) draw(row + at, 1, std::min(kPieceElements, columns - at));
  }
}

}  // namespace mantissa
