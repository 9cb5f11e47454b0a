#include "backend/cuda/checked_index.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

struct RotatedRows {
  CheckedIndices positions;
  const float* table;
  int64_t count, row, rotated, head_dim;  // elements of the last three
  bool inverse, aligned;
};

// A warp has a row. Each channel of the first half of a head turns with that of the second half beside it.
template <class T>
__global__ void __launch_bounds__(kThreads) rotate(RotatedRows k, const T* x, T* y) {
  const int64_t row = OfWarp::row();
  const int64_t position = row < k.count ? checked(k.positions, row) : -1;
  if (position < 0) return;
  const int64_t half = k.head_dim / 2;
  const auto packs = static_cast<uint32_t>(ceil_div(half, int64_t{kPack})), heads = static_cast<uint32_t>(k.rotated / k.head_dim);
  const Packs<const float> cosines{k.table + position * k.head_dim, half, k.aligned}, sines{cosines.values + half, half, k.aligned};
  const T* const from = x + row * k.row;
  T* const to = y + row * k.row;
  for (uint32_t each = lane(); each < heads * packs; each += kWarp) {
    const int64_t head = each / packs * k.head_dim, first = each % packs * kPack;
    Pack a = Packs<const T>{from + head, half, k.aligned}.read(first), b = Packs<const T>{from + head + half, half, k.aligned}.read(first);
    const Pack cosine = cosines.read(first), sine = sines.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float turn = k.inverse ? -sine.at[i] : sine.at[i], before = a.at[i];
      a.at[i] = before * cosine.at[i] - b.at[i] * turn;
      b.at[i] = b.at[i] * cosine.at[i] + before * turn;
    }
    Packs<T>{to + head, half, k.aligned}.write(first, a);
    Packs<T>{to + head + half, half, k.aligned}.write(first, b);
  }
  const int64_t rest = k.row - k.rotated;
  for_each_pack_of_row<OfWarp>(rest, [&](int64_t first) {
    Packs<T>{to + k.rotated, rest, k.aligned}.write(first, Packs<const T>{from + k.rotated, rest, k.aligned}.read(first));
  });
}

}  // namespace

void CudaBackend::execute(const Rope& k) {
  const HeadLayout& layout = k.layout;
  with_values(k.x.dtype(), [&]<class T>() {
    const T* const x = k.x.device_data<T>();
    T* const y = k.y.device_data<T>();
    const float* const table = k.table.device_data<float>();
    const RotatedRows rows{.positions = checked(k.positions, IndexRule::below(ExitCode::internal, "rope", "positions", k.table.dim(0))),
                           .table = table,
                           .count = k.x.dim(0),
                           .row = layout.row(),
                           .rotated = (layout.heads + layout.kv_heads) * layout.head_dim,
                           .head_dim = layout.head_dim,
                           .inverse = k.inverse,
                           .aligned = begin_at_packs(layout.head_dim / 2, x, y, table)};
    launch(rotate<T>, {ceil_div(rows.count, int64_t{OfWarp::kRowsOfBlock}), kThreads}, rows, x, y);
  });
}

}  // namespace mantissa
