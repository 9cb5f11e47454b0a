#include <cmath>
#include <cstdint>
#include <cstring>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/partial_sums.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

// The rows of RMS and layer normalization, for the bodies of cloned<> (simd.h). x [.., channels] is fp32 or bf16; weights and biases are
// given as fp32 so that they are widened once and not for every row.

// y = x * rstd * weight. Returns rstd.
template <class T>
[[gnu::always_inline]] inline float rms_row(const T* __restrict x, const float* __restrict weight, T* __restrict y, int64_t channels,
                                            float eps) {
  simd::Slots squares;
  simd::for_values(
      x, channels, 0.0F, [&](simd::Floats value, int slot) __attribute__((always_inline)) {
        squares.slot[slot] = simd::fma(value, value, squares.slot[slot]);
      });
  const float rstd = 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(channels) + eps);
  for (int64_t j = 0; j < channels; ++j) lane::store(y[j], lane::load(x[j]) * rstd * weight[j]);
  return rstd;
}

struct Moments {
  float mean, rstd;
};

// y = (x - mean) * rstd * weight + bias; bias may be null.
template <class T>
[[gnu::always_inline]] inline Moments layer_norm_row(const T* __restrict x, const float* __restrict weight, const float* __restrict bias,
                                                     T* __restrict y, int64_t channels, float eps) {
  simd::Slots total, squares;
  simd::for_values(
      x, channels, 0.0F, [&](simd::Floats value, int slot) __attribute__((always_inline)) { total.slot[slot] += value; });
  const float mean = simd::sum(total) / static_cast<float>(channels);
  simd::for_values(
      x, channels, mean, [&](simd::Floats value, int slot) __attribute__((always_inline)) {
        const simd::Floats centered = value - mean;
        squares.slot[slot] = simd::fma(centered, centered, squares.slot[slot]);
      });
  const float rstd = 1.0F / std::sqrt(simd::sum(squares) / static_cast<float>(channels) + eps);
  if (bias == nullptr) {
    for (int64_t j = 0; j < channels; ++j) lane::store(y[j], (lane::load(x[j]) - mean) * rstd * weight[j]);
  } else {
    for (int64_t j = 0; j < channels; ++j) lane::store(y[j], (lane::load(x[j]) - mean) * rstd * weight[j] + bias[j]);
  }
  return {mean, rstd};
}

// Means over a row of g = dy * weight and of g * n, n = (x - mean) * rstd.
struct GradientMeans {
  float g, gn;
};
template <class T>
[[gnu::always_inline]] inline GradientMeans gradient_means(const T* x, Moments m, const float* weight, const T* dy, int64_t channels) {
  simd::Slots sum_g, sum_gx;
  simd::for_slots(
      channels, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) {
        const simd::Floats g = simd::load(dy + j, part) * simd::load(weight + j, part);
        sum_g.slot[slot] += g;
        sum_gx.slot[slot] = simd::fma(g, simd::load(x + j, part) - m.mean, sum_gx.slot[slot]);
      });
  const float inverse = 1.0F / static_cast<float>(channels);
  return {simd::sum(sum_g) * inverse, simd::sum(sum_gx) * m.rstd * inverse};
}

// dx = rstd * (g - mean(g) - n * mean(g n)); dweight += dy n; dbias += dy.
template <class T>
[[gnu::always_inline]] inline void layer_norm_row_backward(const T* __restrict x, Moments m, const float* __restrict weight,
                                                           const T* __restrict dy, T* __restrict dx, float* __restrict dweight,
                                                           float* __restrict dbias, int64_t channels) {
  const GradientMeans means = gradient_means(x, m, weight, dy, channels);
  for (int64_t j = 0; j < channels; ++j) {
    const float n = (lane::load(x[j]) - m.mean) * m.rstd, gradient = lane::load(dy[j]);
    dweight[j] = lane::fma(gradient, n, dweight[j]);
    dbias[j] += gradient;
    lane::store(dx[j], m.rstd * (gradient * weight[j] - means.g - n * means.gn));
  }
}

// Like layer_norm_row_backward(), but for RMS normalization: n = x * rstd, dx = rstd * (g - n * mean(g n)).
template <class T>
[[gnu::always_inline]] inline void rms_row_backward(const T* __restrict x, float rstd, const float* __restrict weight,
                                                    const T* __restrict dy, T* __restrict dx, float* __restrict dweight, int64_t channels) {
  const float mean = gradient_means(x, Moments{0.0F, rstd}, weight, dy, channels).gn;
  for (int64_t j = 0; j < channels; ++j) {
    const float n = lane::load(x[j]) * rstd, gradient = lane::load(dy[j]);
    dweight[j] = lane::fma(gradient, n, dweight[j]);
    lane::store(dx[j], rstd * (gradient * weight[j] - n * mean));
  }
}

template <class T>
struct RmsRows {
  const T* x;
  const float* weight;
  T* y;
  float* rstd;
  int64_t channels;
  float eps;
};
template <class T>
[[gnu::always_inline]] inline void rms_rows(RmsRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) k.rstd[i] = rms_row(k.x + i * k.channels, k.weight, k.y + i * k.channels, k.channels, k.eps);
}

template <class T>
struct LayerNormRows {
  const T* x;
  const float *weight, *bias;  // bias may be null
  T* y;
  float *mean, *rstd;
  int64_t channels;
  float eps;
};
template <class T>
[[gnu::always_inline]] inline void layer_norm_rows(LayerNormRows<T> k, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const Moments moments = layer_norm_row(k.x + i * k.channels, k.weight, k.bias, k.y + i * k.channels, k.channels, k.eps);
    k.mean[i] = moments.mean;
    k.rstd[i] = moments.rstd;
  }
}

template <class T>
struct RmsRowsBackward {
  const T* x;
  const float *rstd, *weight;
  const T* dy;
  T* dx;
  int64_t channels;
};
template <class T>
[[gnu::always_inline]] inline void rms_rows_backward(RmsRowsBackward<T> k, float* sums, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * k.channels;
    rms_row_backward(k.x + at, k.rstd[i], k.weight, k.dy + at, k.dx + at, sums, k.channels);
  }
}

template <class T>
struct LayerNormRowsBackward {
  const T* x;
  const float *mean, *rstd, *weight;
  const T* dy;
  T* dx;
  int64_t channels;
};
// The sums are those of dweight, then those of dbias.
template <class T>
[[gnu::always_inline]] inline void layer_norm_rows_backward(LayerNormRowsBackward<T> k, float* sums, int64_t begin, int64_t end) {
  float* dbias = sums + k.channels;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * k.channels;
    const Moments moments{k.mean[i], k.rstd[i]};
    layer_norm_row_backward(k.x + at, moments, k.weight, k.dy + at, k.dx + at, sums, dbias, k.channels);
  }
}

template <auto kBody, class Rows>
void forward(const Rows& rows, int64_t count) {
  parallel_for(count, rows_per_piece(rows.channels), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<kBody>(rows, begin, end); });
}

template <auto kBody, class Rows>
void backward(const Rows& rows, int64_t count, PartialSums& sums) {
  parallel_for(count, sums.rows_per_piece(), Subnormals::flushed,
               [&](int64_t begin, int64_t end) { cloned<kBody>(rows, sums.start(begin), begin, end); });
}

template <class T>
void rms_forward(const RmsNormForward& k) {
  const Tensor weight = converted(k.weight, Dtype::f32);
  const RmsRows<T> rows{.x = k.x.device_data<T>(),
                        .weight = weight.device_data<float>(),
                        .y = k.y.device_data<T>(),
                        .rstd = k.rstd.device_data<float>(),
                        .channels = k.x.dim(1),
                        .eps = static_cast<float>(k.eps)};
  forward<rms_rows<T>>(rows, k.x.dim(0));
}

template <class T>
void rms_backward(const RmsNormBackward& k) {
  const Tensor weight = converted(k.weight, Dtype::f32);
  const RmsRowsBackward<T> rows{.x = k.x.device_data<T>(),
                                .rstd = k.rstd.device_data<float>(),
                                .weight = weight.device_data<float>(),
                                .dy = k.dy.device_data<T>(),
                                .dx = k.dx.device_data<T>(),
                                .channels = k.x.dim(1)};
  PartialSums sums(k.x.device(), k.x.dim(0), rows.channels, rows.channels);
  backward<rms_rows_backward<T>>(rows, k.x.dim(0), sums);
  sums.write(k.dweight, k.accumulate);
}

template <class T>
void layer_forward(const LayerNormForward& k) {
  const Tensor weight = converted(k.weight, Dtype::f32), bias = k.bias.defined() ? converted(k.bias, Dtype::f32) : Tensor();
  const LayerNormRows<T> rows{.x = k.x.device_data<T>(),
                              .weight = weight.device_data<float>(),
                              .bias = bias.defined() ? bias.device_data<float>() : nullptr,
                              .y = k.y.device_data<T>(),
                              .mean = k.mean.device_data<float>(),
                              .rstd = k.rstd.device_data<float>(),
                              .channels = k.x.dim(1),
                              .eps = static_cast<float>(k.eps)};
  forward<layer_norm_rows<T>>(rows, k.x.dim(0));
}

template <class T>
void layer_backward(const LayerNormBackward& k) {
  const Tensor weight = converted(k.weight, Dtype::f32);
  const LayerNormRowsBackward<T> rows{.x = k.x.device_data<T>(),
                                      .mean = k.mean.device_data<float>(),
                                      .rstd = k.rstd.device_data<float>(),
                                      .weight = weight.device_data<float>(),
                                      .dy = k.dy.device_data<T>(),
                                      .dx = k.dx.device_data<T>(),
                                      .channels = k.x.dim(1)};
  PartialSums sums(k.x.device(), k.x.dim(0), 2 * rows.channels, rows.channels);
  backward<layer_norm_rows_backward<T>>(rows, k.x.dim(0), sums);
  sums.write(k.dweight, k.accumulate);
  if (k.dbias.defined()) sums.write(k.dbias, k.accumulate, rows.channels);
}

}  // namespace

void CpuBackend::execute(const RmsNormForward& k) { k.x.dtype() == Dtype::f32 ? rms_forward<float>(k) : rms_forward<bf16>(k); }

void CpuBackend::execute(const RmsNormBackward& k) { k.x.dtype() == Dtype::f32 ? rms_backward<float>(k) : rms_backward<bf16>(k); }

void CpuBackend::execute(const LayerNormForward& k) { k.x.dtype() == Dtype::f32 ? layer_forward<float>(k) : layer_forward<bf16>(k); }

void CpuBackend::execute(const LayerNormBackward& k) { k.x.dtype() == Dtype::f32 ? layer_backward<float>(k) : layer_backward<bf16>(k); }

namespace {

// The values of a packed row, which norms and rotations pass on.

// Copies head by head: between buffers of the same page offset, glibc copies a kilobyte or two backwards, against the prefetcher, at half
// the speed.
template <class T>
void copy_heads(const T* from, T* to, int64_t heads, int64_t head_dim) {
  for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * head_dim, from + h * head_dim, static_cast<size_t>(head_dim) * sizeof(T));
}

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
void qk_forward(const QkNormForward& k) {
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
void qk_backward(const QkNormBackward& k) {
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

void CpuBackend::execute(const QkNormForward& k) { k.x.dtype() == Dtype::f32 ? qk_forward<float>(k) : qk_forward<bf16>(k); }

void CpuBackend::execute(const QkNormBackward& k) { k.x.dtype() == Dtype::f32 ? qk_backward<float>(k) : qk_backward<bf16>(k); }

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
