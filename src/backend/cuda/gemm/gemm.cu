// GEMMs of any operands in fp32, also of groups of rows: the path of what neither cuBLASLt nor tensor cores multiply, on any GPU.
#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/gemm_operand.h"

namespace mantissa {
namespace {

using namespace gpu;

// Calls body(index) for the tiles of a block. Where a flag that is hardly ever up decides about the kernel, few blocks start to look at it,
// and go on from tile to tile.
int64_t blocks_for_tiles(int64_t tiles, OnlyIf only_if) { return only_if.flag == nullptr ? tiles : std::min(tiles, kFewBlocks); }
template <class Body>
__device__ inline void for_each_tile(int64_t tiles, Body body) {
  for (int64_t tile = block(); tile < tiles; tile += blocks()) body(static_cast<unsigned>(tile));
}

// The tiles are those of out.
template <class Out>
__global__ void __launch_bounds__(kThreads, kGemmBlocks)
    gemm(int64_t tiles, GemmSide a, GemmSide b, int64_t depth, GemmTarget<Out> to, OnlyIf only_if) {
  if (!is_up(only_if)) return;
  for_each_tile(tiles, [&](unsigned index) {
    b.outer.first = take_last(index, ceil_div(to.cols, int64_t{kTile})) * kTile;
    a.outer.first = int64_t{index} * kTile;
    Sums sums;
    add_product(block_shared<Sides>(), a, b, depth, sums);
    to.write(sums, a.outer, b.outer);
  });
}

// The tiles of group g begin at index offsets[g] / kTile + g, where those of the groups before have ended: so each finds its group, without
// the host knowing them, and at most one index a group is of no tile.
template <class Out>
__global__ void __launch_bounds__(kThreads, kGemmBlocks)
    grouped_gemm(int64_t tiles, GemmSide a, GemmSide b, int64_t depth, int64_t matrix_rows, GroupOffsets groups, GemmTarget<Out> to,
                 OnlyIf only_if) {
  if (!is_up(only_if)) return;
  const auto first_tile = [&](int64_t g) { return groups.begin(g) / kTile + g; };
  for_each_tile(tiles, [&](unsigned index) {
    b.outer.first = take_last(index, ceil_div(to.cols, int64_t{kTile})) * kTile;
    const int64_t group = groups.last(index, first_tile);
    a.outer = {groups.begin(group) + (index - first_tile(group)) * kTile, groups.end(group)};
    b.matrix.first_row = group * matrix_rows;
    Sums sums;
    if (a.outer.first < a.outer.end) add_product(block_shared<Sides>(), a, b, depth, sums);
    to.write(sums, a.outer, b.outer);
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) clear_rest(T* out, GroupOffsets groups, int64_t rows, int64_t cols) {
  const int64_t first = groups.end() * cols;
  for_each_element(rows * cols - first, [=](int64_t i) { out[first + i] = rounded<T>(0.0F); });
}

// The tiles are those of the groups' gradients, out_rows x cols each.
__global__ void __launch_bounds__(kThreads, kGemmBlocks)
    grouped_weight_gradient(int64_t tiles, GemmSide a, GemmSide b, int64_t out_rows, GroupOffsets groups, GemmTarget<float> to,
                            OnlyIf only_if) {
  if (!is_up(only_if)) return;
  for_each_tile(tiles, [&](unsigned index) {
    b.outer.first = take_last(index, ceil_div(to.cols, int64_t{kTile})) * kTile;
    a.outer.first = take_last(index, ceil_div(out_rows, int64_t{kTile})) * kTile;
    const int64_t group = index, depth = groups.end(group) - groups.begin(group);
    a.matrix.first_row = b.matrix.first_row = groups.begin(group);
    GemmTarget<float> own = to;
    own.out += group * out_rows * to.cols;
    Sums sums;
    add_product(block_shared<Sides>(), a, b, depth, sums);
    own.write(sums, a.outer, b.outer);
  });
}

}  // namespace

void CudaBackend::multiply_plainly(const Gemm& k, OnlyIf only_if) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1);
  const GemmSide a{gemm_matrix(k.a.value), !k.a.transposed, {0, rows}}, b{gemm_matrix(k.b.value), k.b.transposed, {0, cols}};
  const int64_t tiles = ceil_div(rows, int64_t{kTile}) * ceil_div(cols, int64_t{kTile});
  with_values(k.out.dtype(), [&]<class Out>() {
    launch(gemm<Out>, {blocks_for_tiles(tiles, only_if), kThreads}, tiles, a, b, k.a.cols(),
           GemmTarget<Out>{k.out.device_data<Out>(), cols, k.accumulate, bias_of(k)}, only_if);
  });
}

void CudaBackend::multiply_plainly(const GroupedGemm& k, const Tensor& offsets, OnlyIf only_if) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const int64_t tiles = rows == 0 ? 0 : (rows / kTile + groups.count) * ceil_div(cols, int64_t{kTile});
  const GemmSide a{gemm_matrix(k.a.value), true, {0, rows}}, b{gemm_matrix(k.b.value), k.b.transposed, {0, cols}};
  with_values(k.out.dtype(), [&]<class Out>() {
    launch(grouped_gemm<Out>, {blocks_for_tiles(tiles, only_if), kThreads}, tiles, a, b, k.a.cols(), shape_of(k.b.value)[0] / groups.count,
           groups, GemmTarget<Out>{k.out.device_data<Out>(), cols, false}, only_if);
  });
}

void CudaBackend::clear_rows_of_no_group(const Tensor& out, const Tensor& offsets) {
  with_values(out.dtype(), [&]<class T>() {
    launch(clear_rest<T>, {std::min(blocks_for(out.elements()), kFewBlocks), kThreads}, out.device_data<T>(), groups_of(offsets),
           out.dim(0), out.dim(1));
  });
}

void CudaBackend::multiply_plainly(const GroupedWeightGradient& k, const Tensor& offsets, OnlyIf only_if) {
  const int64_t rows = shape_of(k.a)[1], cols = k.out.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const GemmSide a{gemm_matrix(k.a), false, {0, rows}}, b{gemm_matrix(k.b), false, {0, cols}};
  const int64_t tiles = groups.count * ceil_div(rows, int64_t{kTile}) * ceil_div(cols, int64_t{kTile});
  launch(grouped_weight_gradient, {blocks_for_tiles(tiles, only_if), kThreads}, tiles, a, b, rows, groups,
         GemmTarget<float>{k.out.device_data<float>(), cols, k.accumulate}, only_if);
}

}  // namespace mantissa
