#include "backend/cuda/column_sums.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// A block has a row. bias may be null.
template <class T>
__global__ void __launch_bounds__(kThreads)
    layer_norm(const T* x, const T* weight, const T* bias, T* y, float* means, float* rstd, int64_t channels, float eps) {
  const T* const row = x + block() * channels;
  float sum = 0.0F, squares = 0.0F;
  for (int64_t j = thread(); j < channels; j += kThreads) sum += value_of(row[j]);
  const float mean = block_sum(sum) / static_cast<float>(channels);
  for (int64_t j = thread(); j < channels; j += kThreads) squares += (value_of(row[j]) - mean) * (value_of(row[j]) - mean);
  const float scale = 1.0F / sqrtf(block_sum(squares) / static_cast<float>(channels) + eps);
  for (int64_t j = thread(); j < channels; j += kThreads) {
    const float scaled = (value_of(row[j]) - mean) * scale * value_of(weight[j]);
    y[block() * channels + j] = rounded<T>(bias != nullptr ? scaled + value_of(bias[j]) : scaled);
  }
  if (thread() != 0) return;
  means[block()] = mean;
  rstd[block()] = scale;
}

// What the backward pass reads.
template <class T>
struct Rows {
  const T *x, *weight, *dy;
  const float *mean, *rstd;
  int64_t channels;

  __device__ float normalized(int64_t row, int64_t column) const { return (value_of(x[row * channels + column]) - mean[row]) * rstd[row]; }
};

// With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g n)).
template <class T>
__global__ void __launch_bounds__(kThreads) layer_norm_dx(Rows<T> k, T* dx) {
  const T* const dy = k.dy + block() * k.channels;
  float sum_g = 0.0F, sum_gn = 0.0F;
  for (int64_t j = thread(); j < k.channels; j += kThreads) {
    const float g = value_of(dy[j]) * value_of(k.weight[j]);
    sum_g += g;
    sum_gn += g * k.normalized(block(), j);
  }
  const auto channels = static_cast<float>(k.channels);
  const float mean_g = block_sum(sum_g) / channels, mean_gn = block_sum(sum_gn) / channels, scale = k.rstd[block()];
  for (int64_t j = thread(); j < k.channels; j += kThreads) {
    const float g = value_of(dy[j]) * value_of(k.weight[j]);
    dx[block() * k.channels + j] = rounded<T>(scale * (g - mean_g - k.normalized(block(), j) * mean_gn));
  }
}

template <class T>
struct WeightTerm {  // of the gradient of the weight
  Rows<T> rows;

  __device__ float operator()(int64_t row, int64_t column) const {
    return value_of(rows.dy[row * rows.channels + column]) * rows.normalized(row, column);
  }
};

template <class T>
struct BiasTerm {  // of the gradient of the bias
  Rows<T> rows;

  __device__ float operator()(int64_t row, int64_t column) const { return value_of(rows.dy[row * rows.channels + column]); }
};

}  // namespace

void CudaBackend::execute(const LayerNormForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(layer_norm<T>, {k.x.dim(0), kThreads}, k.x.device_data<T>(), k.weight.device_data<T>(), data_or_null<T>(k.bias),
           k.y.device_data<T>(), k.mean.device_data<float>(), k.rstd.device_data<float>(), k.x.dim(1), static_cast<float>(k.eps));
  });
}

void CudaBackend::execute(const LayerNormBackward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1), pieces = ceil_div(rows, kRowsOfPiece);
  const Tensor partials = empty(*this, Dtype::f32, {pieces * channels});
  const auto sum_rows = [&]<class Term>(const Term& term, const Tensor& out) {
    launch(sum_pieces<Term>, {blocks_for(pieces * channels), kThreads}, term, rows, channels, partials.device_data<float>());
    launch(add_pieces<float>, {blocks_for(channels), kThreads}, partials.device_data<float>(), pieces, channels, out.device_data<float>(),
           k.accumulate);
  };
  with_values(k.x.dtype(), [&]<class T>() {
    const Rows<T> all{.x = k.x.device_data<T>(),
                      .weight = k.weight.device_data<T>(),
                      .dy = k.dy.device_data<T>(),
                      .mean = k.mean.device_data<float>(),
                      .rstd = k.rstd.device_data<float>(),
                      .channels = channels};
    launch(layer_norm_dx<T>, {rows, kThreads}, all, k.dx.device_data<T>());
    sum_rows(WeightTerm<T>{all}, k.dweight);
    if (k.dbias.defined()) sum_rows(BiasTerm<T>{all}, k.dbias);
  });
}

}  // namespace mantissa
