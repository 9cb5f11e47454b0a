#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/gemm_operand.h"

namespace mantissa {
namespace {

using namespace gpu;

// A block has a tile of out.
template <class Out>
__global__ void __launch_bounds__(kThreads, kGemmBlocks) gemm(GemmSide a, GemmSide b, int64_t depth, GemmTarget<Out> to, OnlyIf only_if) {
  if (!is_up(only_if)) return;
  auto index = static_cast<unsigned>(block());
  b.outer.first = take_last(index, ceil_div(to.cols, int64_t{kTile})) * kTile;
  a.outer.first = int64_t{index} * kTile;
  Sums sums;
  add_product(block_shared<Sides>(), a, b, depth, sums);
  to.write(sums, a.outer, b.outer);
}

}  // namespace

void CudaBackend::multiply_plainly(const Gemm& k, OnlyIf only_if) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1);
  const GemmSide a{gemm_matrix(k.a.value), !k.a.transposed, {0, rows}}, b{gemm_matrix(k.b.value), k.b.transposed, {0, cols}};
  with_values(k.out.dtype(), [&]<class Out>() {
    launch(gemm<Out>, {ceil_div(rows, int64_t{kTile}) * ceil_div(cols, int64_t{kTile}), kThreads}, a, b, k.a.cols(),
           GemmTarget<Out>{k.out.device_data<Out>(), cols, k.accumulate, bias_of(k)}, only_if);
  });
}

}  // namespace mantissa
