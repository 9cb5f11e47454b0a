#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/norm_rows.h"
#include "backend/cpu/fast/partial_sums.h"
#include "backend/cpu/pieces.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

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

}  // namespace mantissa
