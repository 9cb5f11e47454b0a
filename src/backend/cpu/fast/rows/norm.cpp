#include <cmath>
#include <cstdint>
#include <cstring>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/rows/partial_sums.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
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
[[gnu::always_inline]] inline void layer_norm_rows(const LayerNormForward& k, const float* weight, const float* bias, int64_t begin,
                                                   int64_t end) {
  const int64_t channels = k.x.dim(1);
  const T* x = k.x.device_data<T>();
  T* y = k.y.device_data<T>();
  float *mean = k.mean.device_data<float>(), *rstd = k.rstd.device_data<float>();
  const float eps = static_cast<float>(k.eps);
  for (int64_t i = begin; i < end; ++i) {
    const Moments moments = layer_norm_row(x + i * channels, weight, bias, y + i * channels, channels, eps);
    mean[i] = moments.mean;
    rstd[i] = moments.rstd;
  }
}

// The sums are those of dweight, then those of dbias.
template <class T>
[[gnu::always_inline]] inline void layer_norm_rows_backward(const LayerNormBackward& k, const float* weight, float* sums, int64_t begin,
                                                            int64_t end) {
  const int64_t channels = k.x.dim(1);
  const T *x = k.x.device_data<T>(), *dy = k.dy.device_data<T>();
  T* dx = k.dx.device_data<T>();
  const float *mean = k.mean.device_data<float>(), *rstd = k.rstd.device_data<float>();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i * channels;
    layer_norm_row_backward(x + at, Moments{mean[i], rstd[i]}, weight, dy + at, dx + at, sums, sums + channels, channels);
  }
}

// Weights and biases may be missing.
Tensor fp32(const Tensor& weight) { return weight.defined() ? converted(weight, Dtype::f32) : weight; }
const float* data_of(const Tensor& weight) { return weight.defined() ? weight.device_data<float>() : nullptr; }

}  // namespace

void CpuBackend::execute(const LayerNormForward& k) {
  if (k.sum.defined()) return add_and_normalize(k);
  const Tensor weights = fp32(k.weight), biases = fp32(k.bias);
  const float *weight = data_of(weights), *bias = data_of(biases);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.x.dim(0), rows_per_piece(k.x.dim(1)), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<layer_norm_rows<T>>(k, weight, bias, begin, end); });
  });
}

void CpuBackend::execute(const LayerNormBackward& k) {
  if (k.other.defined()) return differentiate_and_add(k);
  const int64_t channels = k.x.dim(1);
  const Tensor weights = fp32(k.weight);
  const float* weight = data_of(weights);
  PartialSums sums(k.x.device(), k.x.dim(0), 2 * channels, channels);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.x.dim(0), sums.rows_per_piece(), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<layer_norm_rows_backward<T>>(k, weight, sums.start(begin), begin, end); });
  });
  sums.write(k.dweight, k.accumulate);
  if (k.dbias.defined()) sums.write(k.dbias, k.accumulate, channels);
}

namespace {

// Copies values, which norms and rotations of packed rows pass on, head by head: between buffers of the same page offset, glibc copies a
// kilobyte or two backwards, against the prefetcher, at half the speed.
template <class T>
void copy_heads(const T* from, T* to, int64_t heads, int64_t head_dim) {
  for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * head_dim, from + h * head_dim, static_cast<size_t>(head_dim) * sizeof(T));
}

template <class T>
[[gnu::always_inline]] inline void qk_rows(const QkNormForward& k, const float* q_weight, const float* k_weight, int64_t begin,
                                           int64_t end) {
  const int64_t heads = k.layout.heads, normed = heads + k.layout.kv_heads, d = k.layout.head_dim, row = k.layout.row();
  const T* x = k.x.device_data<T>() + begin * row;
  T* y = k.y.device_data<T>() + begin * row;
  float* rstd = k.rstd.device_data<float>() + begin * normed;
  const float eps = static_cast<float>(k.eps);
  for (int64_t i = begin; i < end; ++i, x += row, y += row, rstd += normed) {
    for (int64_t h = 0; h < normed; ++h) rstd[h] = rms_row(x + h * d, h < heads ? q_weight : k_weight, y + h * d, d, eps);
    copy_heads(x + normed * d, y + normed * d, k.layout.kv_heads, d);
  }
}

// The sums are those of dq_weight, then those of dk_weight.
template <class T>
[[gnu::always_inline]] inline void qk_rows_backward(const QkNormBackward& k, const float* q_weight, const float* k_weight, float* sums,
                                                    int64_t begin, int64_t end) {
  const int64_t heads = k.layout.heads, normed = heads + k.layout.kv_heads, d = k.layout.head_dim, row = k.layout.row();
  const T *x = k.x.device_data<T>() + begin * row, *dy = k.dy.device_data<T>() + begin * row;
  T* dx = k.dx.device_data<T>() + begin * row;
  const float* rstd = k.rstd.device_data<float>() + begin * normed;
  for (int64_t i = begin; i < end; ++i, x += row, dy += row, dx += row, rstd += normed) {
    for (int64_t h = 0; h < normed; ++h) {
      const int64_t at = h * d;
      rms_row_backward(x + at, rstd[h], h < heads ? q_weight : k_weight, dy + at, dx + at, h < heads ? sums : sums + d, d);
    }
    copy_heads(dy + normed * d, dx + normed * d, k.layout.kv_heads, d);
  }
}

}  // namespace

void CpuBackend::execute(const QkNormForward& k) {
  const Tensor q_weights = fp32(k.q_weight), k_weights = fp32(k.k_weight);
  const float *q_weight = data_of(q_weights), *k_weight = data_of(k_weights);
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.x.dim(0), rows_per_piece(k.layout.row()), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<qk_rows<T>>(k, q_weight, k_weight, begin, end); });
  });
}

void CpuBackend::execute(const QkNormBackward& k) {
  const Tensor q_weights = fp32(k.q_weight), k_weights = fp32(k.k_weight);
  const float *q_weight = data_of(q_weights), *k_weight = data_of(k_weights);
  PartialSums sums(k.x.device(), k.x.dim(0), (k_weight != nullptr ? 2 : 1) * k.layout.head_dim, k.layout.row());
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.x.dim(0), sums.rows_per_piece(), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<qk_rows_backward<T>>(k, q_weight, k_weight, sums.start(begin), begin, end); });
  });
  sums.write(k.dq_weight, k.accumulate);
  if (k.dk_weight.defined()) sums.write(k.dk_weight, k.accumulate, k.layout.head_dim);
}

namespace {

template <class T>
[[gnu::always_inline]] inline void rotate_rows(const Rope& k, int64_t begin, int64_t end) {
  const int64_t d = k.layout.head_dim, half = d / 2, row = k.layout.row(), rotated = (k.layout.heads + k.layout.kv_heads) * d;
  const T* x = k.x.device_data<T>() + begin * row;
  T* y = k.y.device_data<T>() + begin * row;
  const float *table = k.table.device_data<float>(), direction = k.inverse ? -1.0F : 1.0F;
  const int32_t* positions = k.positions.device_data<int32_t>();
  for (int64_t i = begin; i < end; ++i, x += row, y += row) {
    const float *cosines = table + positions[i] * d, *sines = cosines + half;
    for (int64_t head = 0; head < rotated; head += d) {
      simd::for_lanes(
          half, [&](int64_t j, auto part) __attribute__((always_inline)) {
            const simd::Floats cosine = simd::load(cosines + j, part), sine = simd::load(sines + j, part) * direction;
            const simd::Floats first = simd::load(x + head + j, part), second = simd::load(x + head + half + j, part);
            simd::store(y + head + j, first * cosine - second * sine, part);
            simd::store(y + head + half + j, second * cosine + first * sine, part);
          });
    }
    if (x != y) copy_heads(x + rotated, y + rotated, k.layout.kv_heads, d);
  }
}

}  // namespace

void CpuBackend::execute(const Rope& k) {
  check_indices(k.positions, IndexRule::below(ExitCode::internal, "rope", "positions", k.table.dim(0)));
  with_narrow_values(k.x.dtype(), [&]<class T>() {
    parallel_for(k.x.dim(0), rows_per_piece(k.x.dim(1)), Subnormals::flushed,
                 [&](int64_t begin, int64_t end) { cloned<rotate_rows<T>>(k, begin, end); });
  });
}

}  // namespace mantissa
