#include "backend/cpu/fast/rows/partial_sums.h"

#include <algorithm>

#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

[[gnu::always_inline]] inline void add_pieces(const float* sums, int64_t pieces, int64_t stride, float* out, bool accumulate,
                                              int64_t columns) {
  simd::for_lanes(
      columns, [&](int64_t j, auto part) __attribute__((always_inline)) {
        simd::Floats total = {};
        for (int64_t i = 0; i < pieces; ++i) total += simd::load(sums + i * stride + j, part);
        simd::store(out + j, accumulate ? simd::load(out + j, part) + total : total, part);
      });
}

}  // namespace

PartialSums::PartialSums(Backend& device, int64_t rows, int64_t columns, int64_t work)
    : columns_(columns),
      rows_per_piece_(rows_per_partial(rows, work)),
      pieces_(ceil_div(rows, rows_per_piece_)),
      memory_(device.allocate(pieces_ * columns * static_cast<int64_t>(sizeof(float)))) {}

float* PartialSums::start(int64_t begin) {
  float* sums = reinterpret_cast<float*>(memory_.get()) + begin / rows_per_piece_ * columns_;
  std::fill_n(sums, columns_, 0.0F);
  return sums;
}

void PartialSums::write(const Tensor& out, bool accumulate, int64_t first) const {
  const float* sums = reinterpret_cast<const float*>(memory_.get()) + first;
  float* to = out.device_data<float>();
  parallel_for(
      out.elements(), std::max<int64_t>(64, kPieceElements / std::max<int64_t>(1, pieces_)), Subnormals::flushed,
      [&](int64_t begin, int64_t end) { cloned<add_pieces>(sums + begin, pieces_, columns_, to + begin, accumulate, end - begin); });
}

}  // namespace mantissa
