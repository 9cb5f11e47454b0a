#include <cmath>
#include <cstring>

#include "backend/checks.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/partial_sums.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/simd.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats, simd::Slots, simd::fma, simd::for_lanes, simd::for_slots, simd::load, simd::store;

// y = x * rstd * weight. Returns rstd.
template <class T>
[[gnu::always_inline]] inline float rms_row(const T* x, const T* weight, T* y, int64_t channels, float eps) {
  Slots squares;
  for_slots(
      channels, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) {
        const Floats value = load(x + j, part);
        squares.slot[slot] = fma(value, value, squares.slot[slot]);
      });
  const float rstd = 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(channels) + eps);
  for_lanes(
      channels, [&](int64_t j, auto part)
                    __attribute__((always_inline)) { store(y + j, load(x + j, part) * rstd * load(weight + j, part), part); });
  return rstd;
}

// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g n)); dweight += dy n.
template <class T>
[[gnu::always_inline]] inline void rms_row_backward(const T* x, const T* weight, float rstd, const T* dy, T* dx, float* dweight,
                                                    int64_t channels) {
  Slots products;
  for_slots(
      channels, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) {
        products.slot[slot] = fma(load(dy + j, part) * load(weight + j, part), load(x + j, part), products.slot[slot]);
      });
  const float mean = simd::sum(products) * rstd / static_cast<float>(channels);
  for_lanes(
      channels, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const Floats n = load(x + j, part) * rstd, gradient = load(dy + j, part);
        store(dweight + j, fma(gradient, n, load(dweight + j, part)), part);
        store(dx + j, rstd * (gradient * load(weight + j, part) - n * mean), part);
      });
}

template <class T>
struct RmsRows {
  const T *x, *weight;
  T* y;
  float* rstd;
  int64_t channels;
  float eps;
};
template <class T>
[[gnu::always_inline]] inline void rms_rows(RmsRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) k.rstd[i] = rms_row(k.x + i * k.channels, k.weight, k.y + i * k.channels, k.channels, k.eps);
}
MANTISSA_CLONES void run_rows(RmsRows<float> k, int64_t begin, int64_t end) { rms_rows(k, begin, end); }
MANTISSA_CLONES void run_rows(RmsRows<bf16> k, int64_t begin, int64_t end) { rms_rows(k, begin, end); }

template <class T>
struct RmsRowsBackward {
  const T *x, *weight, *dy;
  const float* rstd;
  T* dx;
  int64_t channels;
};
template <class T>
[[gnu::always_inline]] inline void rms_rows_backward(RmsRowsBackward<T> k, float* dweight, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * k.channels;
    rms_row_backward(k.x + at, k.weight, k.rstd[i], k.dy + at, k.dx + at, dweight, k.channels);
  }
}
MANTISSA_CLONES void run_rows(RmsRowsBackward<float> k, float* sums, int64_t begin, int64_t end) { rms_rows_backward(k, sums, begin, end); }
MANTISSA_CLONES void run_rows(RmsRowsBackward<bf16> k, float* sums, int64_t begin, int64_t end) { rms_rows_backward(k, sums, begin, end); }

template <class T>
struct LayerNormRows {
  const T *x, *weight, *bias;  // bias may be null
  T* y;
  float *mean, *rstd;
  int64_t channels;
  float eps;
};
template <class T>
[[gnu::always_inline]] inline void layer_norm_row(const LayerNormRows<T>& k, int64_t row) {
  const T* x = k.x + row * k.channels;
  T* y = k.y + row * k.channels;
  Slots total, squares;
  for_slots(
      k.channels, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) { total.slot[slot] += load(x + j, part); });
  const float mean = simd::sum(total) / static_cast<float>(k.channels);
  for_slots(
      k.channels, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) {
        const Floats centred = load(x + j, part, mean) - mean;
        squares.slot[slot] = fma(centred, centred, squares.slot[slot]);
      });
  const float rstd = 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(k.channels) + k.eps);
  for_lanes(
      k.channels, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const Floats scaled = (load(x + j, part) - mean) * rstd * load(k.weight + j, part);
        store(y + j, k.bias == nullptr ? scaled : scaled + load(k.bias + j, part), part);
      });
  k.mean[row] = mean;
  k.rstd[row] = rstd;
}
template <class T>
[[gnu::always_inline]] inline void layer_norm_rows(LayerNormRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) layer_norm_row(k, i);
}
MANTISSA_CLONES void run_rows(LayerNormRows<float> k, int64_t begin, int64_t end) { layer_norm_rows(k, begin, end); }
MANTISSA_CLONES void run_rows(LayerNormRows<bf16> k, int64_t begin, int64_t end) { layer_norm_rows(k, begin, end); }

template <class T>
struct LayerNormRowsBackward {
  const T *x, *weight, *dy;
  const float *mean, *rstd;
  T* dx;
  int64_t channels;
};
// With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g n)); dweight += dy n; dbias += dy.
template <class T>
[[gnu::always_inline]] inline void layer_norm_row_backward(const LayerNormRowsBackward<T>& k, float* dweight, float* dbias, int64_t row) {
  const T *x = k.x + row * k.channels, *dy = k.dy + row * k.channels, *weight = k.weight;
  T* dx = k.dx + row * k.channels;
  const float mean = k.mean[row], rstd = k.rstd[row], inverse_channels = 1.0F / static_cast<float>(k.channels);
  Slots sum_g, sum_gn;
  for_slots(
      k.channels, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) {
        const Floats g = load(dy + j, part) * load(weight + j, part);
        sum_g.slot[slot] += g;
        sum_gn.slot[slot] = fma(g, (load(x + j, part) - mean) * rstd, sum_gn.slot[slot]);
      });
  const float mean_g = simd::sum(sum_g) * inverse_channels, mean_gn = simd::sum(sum_gn) * inverse_channels;
  for_lanes(
      k.channels, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const Floats n = (load(x + j, part) - mean) * rstd, gradient = load(dy + j, part);
        store(dweight + j, fma(gradient, n, load(dweight + j, part)), part);
        store(dbias + j, gradient + load(dbias + j, part), part);
        store(dx + j, rstd * (gradient * load(weight + j, part) - mean_g - n * mean_gn), part);
      });
}
template <class T>
[[gnu::always_inline]] inline void layer_norm_rows_backward(LayerNormRowsBackward<T> k, float* sums, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) layer_norm_row_backward(k, sums, sums + k.channels, i);
}
MANTISSA_CLONES void run_rows(LayerNormRowsBackward<float> k, float* sums, int64_t begin, int64_t end) {
  layer_norm_rows_backward(k, sums, begin, end);
}
MANTISSA_CLONES void run_rows(LayerNormRowsBackward<bf16> k, float* sums, int64_t begin, int64_t end) {
  layer_norm_rows_backward(k, sums, begin, end);
}

template <class T>
struct QkRows {
  const T *x, *q_weight, *k_weight;
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
      const T* weight = h < k.layout.heads ? k.q_weight : k.k_weight;
      k.rstd[i * normed + h] = rms_row(x + h * d, weight, y + h * d, d, k.eps);
    }
    std::memcpy(y + normed * d, x + normed * d, static_cast<size_t>(row - normed * d) * sizeof(T));
  }
}
MANTISSA_CLONES void run_rows(QkRows<float> k, int64_t begin, int64_t end) { qk_rows(k, begin, end); }
MANTISSA_CLONES void run_rows(QkRows<bf16> k, int64_t begin, int64_t end) { qk_rows(k, begin, end); }

template <class T>
struct QkRowsBackward {
  const T *x, *q_weight, *k_weight, *dy;
  const float* rstd;
  T* dx;
  HeadLayout layout;
};
template <class T>
[[gnu::always_inline]] inline void qk_rows_backward(QkRowsBackward<T> k, float* sums, int64_t begin, int64_t end) {
  const int64_t normed = k.layout.heads + k.layout.kv_heads, d = k.layout.head_dim, row = k.layout.row();
  for (int64_t i = begin; i < end; ++i) {
    const T *x = k.x + i * row, *dy = k.dy + i * row;
    T* dx = k.dx + i * row;
    for (int64_t h = 0; h < normed; ++h) {
      const bool query = h < k.layout.heads;
      rms_row_backward(x + h * d, query ? k.q_weight : k.k_weight, k.rstd[i * normed + h], dy + h * d, dx + h * d, query ? sums : sums + d,
                       d);
    }
    std::memcpy(dx + normed * d, dy + normed * d, static_cast<size_t>(row - normed * d) * sizeof(T));
  }
}
MANTISSA_CLONES void run_rows(QkRowsBackward<float> k, float* sums, int64_t begin, int64_t end) { qk_rows_backward(k, sums, begin, end); }
MANTISSA_CLONES void run_rows(QkRowsBackward<bf16> k, float* sums, int64_t begin, int64_t end) { qk_rows_backward(k, sums, begin, end); }

template <class Rows>
void forward(const Rows& rows, int64_t count, int64_t columns) {
  parallel_for(count, rows_per_piece(columns), [&](int64_t begin, int64_t end) { run_rows(rows, begin, end); });
}

template <class Rows>
void backward(const Rows& rows, int64_t count, PartialSums& sums) {
  parallel_for(count, sums.rows_per_piece(), [&](int64_t begin, int64_t end) { run_rows(rows, sums.start(begin), begin, end); });
}

template <class T>
void rms_forward(const RmsNormForward& k) {
  const RmsRows<T> rows{.x = k.x.data<T>(),
                        .weight = k.weight.data<T>(),
                        .y = k.y.data<T>(),
                        .rstd = k.rstd.data<float>(),
                        .channels = k.x.dim(1),
                        .eps = static_cast<float>(k.eps)};
  forward(rows, k.x.dim(0), k.x.dim(1));
}

template <class T>
void rms_backward(const RmsNormBackward& k) {
  const RmsRowsBackward<T> rows{.x = k.x.data<T>(),
                                .weight = k.weight.data<T>(),
                                .dy = k.dy.data<T>(),
                                .rstd = k.rstd.data<float>(),
                                .dx = k.dx.data<T>(),
                                .channels = k.x.dim(1)};
  PartialSums sums(k.x.device(), k.x.dim(0), k.x.dim(1), k.x.dim(1));
  backward(rows, k.x.dim(0), sums);
  sums.write(k.dweight, k.accumulate);
}

template <class T>
void layer_forward(const LayerNormForward& k) {
  const LayerNormRows<T> rows{.x = k.x.data<T>(),
                              .weight = k.weight.data<T>(),
                              .bias = k.bias.defined() ? k.bias.data<T>() : nullptr,
                              .y = k.y.data<T>(),
                              .mean = k.mean.data<float>(),
                              .rstd = k.rstd.data<float>(),
                              .channels = k.x.dim(1),
                              .eps = static_cast<float>(k.eps)};
  forward(rows, k.x.dim(0), k.x.dim(1));
}

template <class T>
void layer_backward(const LayerNormBackward& k) {
  const int64_t channels = k.x.dim(1);
  const LayerNormRowsBackward<T> rows{.x = k.x.data<T>(),
                                      .weight = k.weight.data<T>(),
                                      .dy = k.dy.data<T>(),
                                      .mean = k.mean.data<float>(),
                                      .rstd = k.rstd.data<float>(),
                                      .dx = k.dx.data<T>(),
                                      .channels = channels};
  PartialSums sums(k.x.device(), k.x.dim(0), 2 * channels, channels);
  backward(rows, k.x.dim(0), sums);
  sums.write(k.dweight, k.accumulate);
  if (k.dbias.defined()) sums.write(k.dbias, k.accumulate, channels);
}

template <class T>
void qk_forward(const QkNormForward& k) {
  const QkRows<T> rows{.x = k.x.data<T>(),
                       .q_weight = k.q_weight.data<T>(),
                       .k_weight = k.k_weight.data<T>(),
                       .y = k.y.data<T>(),
                       .rstd = k.rstd.data<float>(),
                       .layout = k.layout,
                       .eps = static_cast<float>(k.eps)};
  forward(rows, k.x.dim(0), k.x.dim(1));
}

template <class T>
void qk_backward(const QkNormBackward& k) {
  const int64_t d = k.layout.head_dim;
  const QkRowsBackward<T> rows{.x = k.x.data<T>(),
                               .q_weight = k.q_weight.data<T>(),
                               .k_weight = k.k_weight.data<T>(),
                               .dy = k.dy.data<T>(),
                               .rstd = k.rstd.data<float>(),
                               .dx = k.dx.data<T>(),
                               .layout = k.layout};
  PartialSums sums(k.x.device(), k.x.dim(0), 2 * d, k.layout.row());
  backward(rows, k.x.dim(0), sums);
  sums.write(k.dq_weight, k.accumulate);
  sums.write(k.dk_weight, k.accumulate, d);
}

}  // namespace

void CpuBackend::run(const RmsNormForward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? rms_forward<float>(k) : rms_forward<bf16>(k);
}

void CpuBackend::run(const RmsNormBackward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? rms_backward<float>(k) : rms_backward<bf16>(k);
}

void CpuBackend::run(const LayerNormForward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? layer_forward<float>(k) : layer_forward<bf16>(k);
}

void CpuBackend::run(const LayerNormBackward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? layer_backward<float>(k) : layer_backward<bf16>(k);
}

void CpuBackend::run(const QkNormForward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? qk_forward<float>(k) : qk_forward<bf16>(k);
}

void CpuBackend::run(const QkNormBackward& k) {
  check(k);
  if (k.x.dtype() == Dtype::f64) return CpuReference::run(k);
  k.x.dtype() == Dtype::f32 ? qk_backward<float>(k) : qk_backward<bf16>(k);
}

}  // namespace mantissa
