#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/copy_heads.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/norm_rows.h"
#include "backend/cpu/fast/partial_sums.h"
#include "backend/cpu/pieces.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

template <class T>
struct QkRows {
  const T* x;
  const float *q_weight, *k_weight;
  T* y;
  float* rstd;
  HeadLayout layout;
  float eps;
};
template <class T>
[[gnu::always_inline]] inline void qk_rows(QkRows<T> k, int64_t begin, int64_t end) {
  const int64_t normed = k.layout.heads + k.layout.kv_heads, d = k.layout.head_dim, row = k.layout.row();
  for (int64_t i = begin; i < end; ++i) {
    const T* x = k.x + i * row;
    T* y = k.y + i * row;
    for (int64_t h = 0; h < normed; ++h) {
      k.rstd[i * normed + h] = rms_row(x + h * d, h < k.layout.heads ? k.q_weight : k.k_weight, y + h * d, d, k.eps);
    }
    copy_heads(x + normed * d, y + normed * d, k.layout.kv_heads, d);
  }
}

template <class T>
struct QkRowsBackward {
  const T* x;
  const float *rstd, *q_weight, *k_weight;
  const T* dy;
  T* dx;
  HeadLayout layout;
};
// The sums are those of dq_weight, then those of dk_weight.
template <class T>
[[gnu::always_inline]] inline void qk_rows_backward(QkRowsBackward<T> k, float* sums, int64_t begin, int64_t end) {
  const int64_t heads = k.layout.heads, normed = heads + k.layout.kv_heads, d = k.layout.head_dim, row = k.layout.row();
  for (int64_t i = begin; i < end; ++i) {
    const T *x = k.x + i * row, *dy = k.dy + i * row;
    T* dx = k.dx + i * row;
    for (int64_t h = 0; h < normed; ++h) {
      const int64_t at = h * d;
      const float rstd = k.rstd[i * normed + h], *weight = h < heads ? k.q_weight : k.k_weight;
      rms_row_backward(x + at, rstd, weight, dy + at, dx + at, h < heads ? sums : sums + d, d);
    }
    copy_heads(dy + normed * d, dx + normed * d, k.layout.kv_heads, d);
  }
}

template <class T>
void forward(const QkNormForward& k) {
  const Tensor q_weight = converted(k.q_weight, Dtype::f32), k_weight = converted(k.k_weight, Dtype::f32);
  const QkRows<T> rows{.x = k.x.device_data<T>(),
                       .q_weight = q_weight.device_data<float>(),
                       .k_weight = k_weight.device_data<float>(),
                       .y = k.y.device_data<T>(),
                       .rstd = k.rstd.device_data<float>(),
                       .layout = k.layout,
                       .eps = static_cast<float>(k.eps)};
  parallel_for(k.x.dim(0), rows_per_piece(k.layout.row()), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<qk_rows<T>>(rows, begin, end); });
}

template <class T>
void backward(const QkNormBackward& k) {
  const Tensor q_weight = converted(k.q_weight, Dtype::f32), k_weight = converted(k.k_weight, Dtype::f32);
  const QkRowsBackward<T> rows{.x = k.x.device_data<T>(),
                               .rstd = k.rstd.device_data<float>(),
                               .q_weight = q_weight.device_data<float>(),
                               .k_weight = k_weight.device_data<float>(),
                               .dy = k.dy.device_data<T>(),
                               .dx = k.dx.device_data<T>(),
                               .layout = k.layout};
  PartialSums sums(k.x.device(), k.x.dim(0), 2 * k.layout.head_dim, k.layout.row());
  parallel_for(k.x.dim(0), sums.rows_per_piece(), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<qk_rows_backward<T>>(rows, sums.start(begin), begin, end); });
  sums.write(k.dq_weight, k.accumulate);
  sums.write(k.dk_weight, k.accumulate, k.layout.head_dim);
}

}  // namespace

void CpuBackend::execute(const QkNormForward& k) { k.x.dtype() == Dtype::f32 ? forward<float>(k) : forward<bf16>(k); }

void CpuBackend::execute(const QkNormBackward& k) { k.x.dtype() == Dtype::f32 ? backward<float>(k) : backward<bf16>(k); }

}  // namespace mantissa
