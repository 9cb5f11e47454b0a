#include "backend/cuda/checked_index.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

struct RotatedRows {
  CheckedIndices positions;
  const float* table;
  int64_t count, row;
  unsigned heads, head_dim;
  bool inverse;
};

// A warp has a row, and a lane the same channels in several heads of it. Each channel of the first half of a head turns with that of the
// second half beside it. y may be x, which then keeps the other heads.
template <bool kWhole, class T>
__global__ void __launch_bounds__(kThreads) rotate(RotatedRows k, const T* x, T* y) {
  constexpr unsigned kAtOnce = 2;
  const int64_t row = OfWarp::row();
  const int64_t position = row < k.count ? checked(k.positions, row) : -1;
  if (position < 0) return;
  const unsigned half = k.head_dim / 2, packs = (half + kPack - 1) / kPack, lanes = packs < kWarp ? packs : kWarp, beside = kWarp / lanes;
  const Packs<const float, kWhole> cosines{k.table + position * k.head_dim, half, kWhole}, sines{cosines.values + half, half, kWhole};
  const auto half_of = [half]<class V>(V* values, unsigned i) { return Packs<V, kWhole>{values + i * half, half, kWhole}; };
  const T* const from = x + row * k.row;
  T* const to = y + row * k.row;
  const unsigned first_head = lane() < lanes * beside ? lane() / lanes : k.heads;
  for (unsigned channel = lane() % lanes * kPack; channel < half; channel += lanes * kPack) {
    const Pack cosine = cosines.read_constant(channel);
    Pack sine = sines.read_constant(channel);
    for (float& value : sine.at) value = k.inverse ? -value : value;
    MANTISSA_UNROLL_BY(1)
    for (unsigned head = first_head; head < k.heads; head += kAtOnce * beside) {
      Pack a[kAtOnce], b[kAtOnce];
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kAtOnce; ++i) {
        const unsigned own = head + i * beside < k.heads ? head + i * beside : head;
        a[i] = half_of(from, 2 * own).read(channel), b[i] = half_of(from, 2 * own + 1).read(channel);
      }
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kAtOnce; ++i) {
        MANTISSA_UNROLL
        for (unsigned j = 0; j < kPack; ++j) {
          const float before = a[i].at[j];
          a[i].at[j] = multiply_add(before, cosine.at[j], -(b[i].at[j] * sine.at[j]));
          b[i].at[j] = multiply_add(b[i].at[j], cosine.at[j], before * sine.at[j]);
        }
        const unsigned own = head + i * beside;
        if (own < k.heads) half_of(to, 2 * own).write(channel, a[i]), half_of(to, 2 * own + 1).write(channel, b[i]);
      }
    }
  }
  const int64_t rotated = int64_t{k.heads} * k.head_dim, rest = x == y ? 0 : k.row - rotated;
  const Packs<const T, kWhole> others{from + rotated, rest, kWhole};
  for_each_pack_of_row<OfWarp>(rest, [&](int64_t first) { Packs<T, kWhole>{to + rotated, rest, kWhole}.write(first, others.read(first)); });
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
                           .heads = static_cast<unsigned>(layout.heads + layout.kv_heads),
                           .head_dim = static_cast<unsigned>(layout.head_dim),
                           .inverse = k.inverse};
    const auto kernel = begin_at_packs(layout.head_dim / 2, x, y, table) ? rotate<true, T> : rotate<false, T>;
    launch(kernel, {ceil_div(rows.count, int64_t{OfWarp::kRowsOfBlock}), kThreads}, rows, x, y);
  });
}

}  // namespace mantissa
