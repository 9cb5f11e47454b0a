// The rows of RMS and layer normalization, for the bodies of cloned<> (clones.h). x [.., channels] is fp32 or bf16; weights and biases are
// given as fp32 so that they are widened once and not for every row.
#pragma once

#include <cmath>

#include "backend/cpu/fast/lane_math.h"
#include "backend/cpu/fast/simd.h"

namespace mantissa {

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

}  // namespace mantissa
