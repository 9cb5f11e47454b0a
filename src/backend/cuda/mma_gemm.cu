#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/groups.h"
#include "backend/cuda/mma_tile.h"

namespace mantissa {
namespace {

using namespace gpu;

constexpr unsigned kMmaBlocks = 2;  // of a multiprocessor, so that one copies while the other multiplies

template <class Out>
__global__ void __launch_bounds__(kThreads, kMmaBlocks) mma_gemm(MmaSide a, MmaSide b, int64_t rows, int64_t depth, GemmTarget<Out> to) {
  auto index = static_cast<unsigned>(block());
  const Range columns{take_last(index, ceil_div(to.cols, int64_t{kMmaTile})) * kMmaTile, to.cols};
  const Range of_tile{int64_t{index} * kMmaTile, rows};
  MmaSums sums;
  add_mma(block_shared<MmaTiles>(), a, of_tile, b, columns, {0, depth}, sums);
  write_mma(sums, to, of_tile, columns);
}

// As grouped_gemm.cu: the tiles of group g begin at index offsets[g] / kMmaTile + g.
template <class Out>
__global__ void __launch_bounds__(kThreads, kMmaBlocks)
    grouped_mma(MmaSide a, MmaSide b, int64_t depth, int64_t matrix_rows, GroupOffsets groups, Out* out, int64_t cols) {
  auto index = static_cast<unsigned>(block());
  const int64_t first_col = take_last(index, ceil_div(cols, int64_t{kMmaTile})) * kMmaTile;
  const auto first_tile = [&](int64_t g) { return groups.begin(g) / kMmaTile + g; };
  const int64_t group = groups.last(index, first_tile);
  const Range rows{groups.begin(group) + (index - first_tile(group)) * kMmaTile, groups.end(group)}, columns{first_col, cols};
  b.values += group * matrix_rows * b.row;
  MmaSums sums;
  if (rows.first < rows.end) add_mma(block_shared<MmaTiles>(), a, rows, b, columns, {0, depth}, sums);
  write_mma(sums, GemmTarget<Out>{out, cols, false}, rows, columns);
}

// A block has a tile of a group's gradient, out_rows x cols.
__global__ void __launch_bounds__(kThreads, kMmaBlocks)
    grouped_weight_mma(MmaSide a, MmaSide b, GroupOffsets groups, float* out, int64_t out_rows, int64_t cols, bool accumulate) {
  auto index = static_cast<unsigned>(block());
  const int64_t first_col = take_last(index, ceil_div(cols, int64_t{kMmaTile})) * kMmaTile;
  const int64_t first_row = take_last(index, ceil_div(out_rows, int64_t{kMmaTile})) * kMmaTile;
  const int64_t group = index;
  const Range rows{first_row, out_rows}, columns{first_col, cols};
  MmaSums sums;
  add_mma(block_shared<MmaTiles>(), a, rows, b, columns, {groups.begin(group), groups.end(group)}, sums);
  write_mma(sums, GemmTarget<float>{out + group * out_rows * cols, cols, accumulate}, rows, columns);
}

MmaSide mma_side(const Tensor& values, bool by_depth) { return {values.device_data<bf16>(), values.dim(1), by_depth}; }

}  // namespace

void CudaBackend::multiply_values(const Gemm& k) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1);
  const MmaSide a = mma_side(k.a.dense(), !k.a.transposed), b = mma_side(k.b.dense(), k.b.transposed);
  with_values(k.out.dtype(), [&]<class Out>() {
    launch(mma_gemm<Out>, {ceil_div(rows, int64_t{kMmaTile}) * ceil_div(cols, int64_t{kMmaTile}), kThreads}, a, b, rows, k.a.cols(),
           GemmTarget<Out>{k.out.device_data<Out>(), cols, k.accumulate, bias_of(k)});
  });
}

void CudaBackend::multiply_groups(const Tensor& a, const Tensor& b, bool b_by_depth, const Tensor& offsets, const Tensor& out) {
  const int64_t rows = out.dim(0), cols = out.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const int64_t tiles = rows == 0 ? 0 : rows / kMmaTile + groups.count;
  with_values(out.dtype(), [&]<class Out>() {
    launch(grouped_mma<Out>, {tiles * ceil_div(cols, int64_t{kMmaTile}), kThreads}, mma_side(a, true), mma_side(b, b_by_depth), a.dim(1),
           b.dim(0) / groups.count, groups, out.device_data<Out>(), cols);
  });
}

void CudaBackend::multiply_groups_for_weights(const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& out, bool accumulate) {
  const int64_t rows = a.dim(1), cols = b.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  launch(grouped_weight_mma, {groups.count * ceil_div(rows, int64_t{kMmaTile}) * ceil_div(cols, int64_t{kMmaTile}), kThreads},
         mma_side(a, false), mma_side(b, false), groups, out.device_data<float>(), rows, cols, accumulate);
}

}  // namespace mantissa
