#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/groups.h"
#include "backend/cuda/mma_tile.h"

namespace mantissa {
namespace {

using namespace gpu;

template <class Out, bool kA, bool kB>
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks)
    mma_gemm(MmaSide<kA> a, MmaSide<kB> b, int64_t rows, int64_t depth, GemmTarget<Out> to) {
  auto index = static_cast<unsigned>(block());
  const Range columns{take_last(index, ceil_div(to.cols, int64_t{kMmaCols})) * kMmaCols, to.cols};
  const Range of_tile{int64_t{index} * kMmaRows, rows};
  MmaSums sums;
  add_mma(launched_shared<MmaTiles<kA, kB>>(), a, of_tile, b, columns, {0, depth}, sums);
  write_mma(sums, to, of_tile, columns);
}

// A block has a tile of a group. Like in grouped_gemm.cu, the tiles of group g begin at index offsets[g] / kMmaRows + g.
template <class Out, bool kB>
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks)
    grouped_mma(MmaSide<true> a, MmaSide<kB> b, int64_t depth, int64_t matrix_rows, GroupOffsets groups, Out* out, int64_t cols) {
  auto index = static_cast<unsigned>(block());
  const int64_t first_col = take_last(index, ceil_div(cols, int64_t{kMmaCols})) * kMmaCols;
  const auto first_tile = [&](int64_t g) { return groups.begin(g) / kMmaRows + g; };
  const int64_t group = groups.last(index, first_tile);
  const Range rows{groups.begin(group) + (index - first_tile(group)) * kMmaRows, groups.end(group)}, columns{first_col, cols};
  if (rows.first >= rows.end) return;
  b.values += group * matrix_rows * b.row;
  MmaSums sums;
  add_mma(launched_shared<MmaTiles<true, kB>>(), a, rows, b, columns, {0, depth}, sums);
  write_mma(sums, GemmTarget<Out>{out, cols, false}, rows, columns);
}

// A block has a tile of a group's gradient, out_rows x cols.
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks) grouped_weight_mma(MmaSide<false> a, MmaSide<false> b, GroupOffsets groups,
                                                                              float* out, int64_t out_rows, int64_t cols, bool accumulate) {
  auto index = static_cast<unsigned>(block());
  const int64_t first_col = take_last(index, ceil_div(cols, int64_t{kMmaCols})) * kMmaCols;
  const int64_t first_row = take_last(index, ceil_div(out_rows, int64_t{kMmaRows})) * kMmaRows;
  const int64_t group = index;
  const Range rows{first_row, out_rows}, columns{first_col, cols}, depth{groups.begin(group), groups.end(group)};
  MmaSums sums;
  if (depth.first < depth.end) add_mma(launched_shared<MmaTiles<false, false>>(), a, rows, b, columns, depth, sums);
  write_mma(sums, GemmTarget<float>{out + group * out_rows * cols, cols, accumulate}, rows, columns);
}

template <bool kByDepth>
MmaSide<kByDepth> mma_side(const Tensor& values) {
  return {values.device_data<bf16>(), values.dim(1)};
}

template <bool kA, bool kB>
Grid mma_grid(int64_t tiles) {
  return {tiles, kMmaThreads, sizeof(MmaTiles<kA, kB>)};
}

// Calls body.template operator()<by_depth>().
template <class Body>
void with_order(bool by_depth, Body&& body) {
  by_depth ? body.template operator()<true>() : body.template operator()<false>();
}

}  // namespace

void CudaBackend::multiply_values(const Gemm& k) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1);
  const auto multiply = [&]<class Out, bool kA, bool kB>() {
    launch(mma_gemm<Out, kA, kB>, mma_grid<kA, kB>(ceil_div(rows, int64_t{kMmaRows}) * ceil_div(cols, int64_t{kMmaCols})),
           mma_side<kA>(k.a.dense()), mma_side<kB>(k.b.dense()), rows, k.a.cols(),
           GemmTarget<Out>{k.out.device_data<Out>(), cols, k.accumulate, bias_of(k)});
  };
  with_values(k.out.dtype(), [&]<class Out>() {
    with_order(!k.a.transposed,
               [&]<bool kA>() { with_order(k.b.transposed, [&]<bool kB>() { multiply.template operator()<Out, kA, kB>(); }); });
  });
}

void CudaBackend::multiply_groups(const Tensor& a, const Tensor& b, bool b_by_depth, const Tensor& offsets, const Tensor& out) {
  const int64_t rows = out.dim(0), cols = out.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const int64_t tiles = rows == 0 ? 0 : (rows / kMmaRows + groups.count) * ceil_div(cols, int64_t{kMmaCols});
  with_values(out.dtype(), [&]<class Out>() {
    with_order(b_by_depth, [&]<bool kB>() {
      launch(grouped_mma<Out, kB>, mma_grid<true, kB>(tiles), mma_side<true>(a), mma_side<kB>(b), a.dim(1), b.dim(0) / groups.count, groups,
             out.device_data<Out>(), cols);
    });
  });
}

void CudaBackend::multiply_groups_for_weights(const Tensor& a, const Tensor& b, const Tensor& offsets, const Tensor& out, bool accumulate) {
  const int64_t rows = a.dim(1), cols = b.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const int64_t tiles = groups.count * ceil_div(rows, int64_t{kMmaRows}) * ceil_div(cols, int64_t{kMmaCols});
  launch(grouped_weight_mma, mma_grid<false, false>(tiles), mma_side<false>(a), mma_side<false>(b), groups, out.device_data<float>(), rows,
         cols, accumulate);
}

}  // namespace mantissa
