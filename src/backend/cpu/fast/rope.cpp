#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/copy_heads.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats, simd::load, simd::store;

template <class T>
struct RopeRows {
  const T* x;
  T* y;
  const float* table;
  const int32_t* positions;
  HeadLayout layout;
  float direction;  // 1, or -1 for the inverse
};

template <class T>
[[gnu::always_inline]] inline void rotate_head(const T* x, T* y, const float* cosines, const float* sines, float direction, int64_t half) {
  simd::for_lanes(
      half, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const Floats cosine = load(cosines + j, part), sine = load(sines + j, part) * direction;
        const Floats first = load(x + j, part), second = load(x + half + j, part);
        store(y + j, first * cosine - second * sine, part);
        store(y + half + j, second * cosine + first * sine, part);
      });
}

template <class T>
[[gnu::always_inline]] inline void rotate_rows(RopeRows<T> k, int64_t begin, int64_t end) {
  const int64_t d = k.layout.head_dim, half = d / 2, row = k.layout.row(), rotated = (k.layout.heads + k.layout.kv_heads) * d;
  for (int64_t i = begin; i < end; ++i) {
    const T* x = k.x + i * row;
    T* y = k.y + i * row;
    const float* table = k.table + k.positions[i] * d;
    for (int64_t head = 0; head < rotated; head += d) rotate_head(x + head, y + head, table, table + half, k.direction, half);
    copy_heads(x + rotated, y + rotated, k.layout.kv_heads, d);
  }
}

template <class T>
void rope(const Rope& k) {
  const RopeRows<T> rows{.x = k.x.device_data<T>(),
                         .y = k.y.device_data<T>(),
                         .table = k.table.device_data<float>(),
                         .positions = k.positions.device_data<int32_t>(),
                         .layout = k.layout,
                         .direction = k.inverse ? -1.0F : 1.0F};
  parallel_for(k.x.dim(0), rows_per_piece(k.x.dim(1)), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<rotate_rows<T>>(rows, begin, end); });
}

}  // namespace

void CpuBackend::execute(const Rope& k) {
  check_indices(ExitCode::internal, "rope", "positions", k.positions, k.table.dim(0));
  k.x.dtype() == Dtype::f32 ? rope<float>(k) : rope<bf16>(k);
}

}  // namespace mantissa
