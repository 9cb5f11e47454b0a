#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"

namespace mantissa {
namespace {

using namespace gpu;

struct Rows {
  CheckedIndices positions;
  const float* table;
  int64_t row, rotated, head_dim;  // elements
  bool inverse;
};

// A block has a row.
template <class T>
__global__ void __launch_bounds__(kThreads) rotate(Rows k, const T* x, T* y) {
  const int64_t position = checked(k.positions, block());
  if (position < 0) return;
  const float* const table = k.table + position * k.head_dim;
  const T* const from = x + block() * k.row;
  T* const to = y + block() * k.row;
  const auto half = static_cast<uint32_t>(k.head_dim / 2), pairs = static_cast<uint32_t>(k.rotated / 2);
  for (uint32_t pair = thread(); pair < pairs; pair += kThreads) {
    const uint32_t j = pair % half, at = pair / half * 2 * half + j;
    const float cosine = table[j], sine = k.inverse ? -table[half + j] : table[half + j];
    const float first = value_of(from[at]), second = value_of(from[at + half]);
    to[at] = rounded<T>(first * cosine - second * sine);
    to[at + half] = rounded<T>(second * cosine + first * sine);
  }
  for (int64_t j = k.rotated + thread(); j < k.row; j += kThreads) to[j] = from[j];
}

}  // namespace

void CudaBackend::execute(const Rope& k) {
  const HeadLayout& layout = k.layout;
  const Rows rows{.positions = checked(k.positions, IndexRule::below(ExitCode::internal, "rope", "positions", k.table.dim(0))),
                  .table = k.table.device_data<float>(),
                  .row = layout.row(),
                  .rotated = (layout.heads + layout.kv_heads) * layout.head_dim,
                  .head_dim = layout.head_dim,
                  .inverse = k.inverse};
  with_values(k.x.dtype(), [&]<class T>() { launch(rotate<T>, {k.x.dim(0), kThreads}, rows, k.x.device_data<T>(), k.y.device_data<T>()); });
}

}  // namespace mantissa
