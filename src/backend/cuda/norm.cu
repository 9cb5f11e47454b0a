#include "backend/cuda/column_sums.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// A block has a row.
template <class T>
__global__ void __launch_bounds__(kThreads) rms_norm(const T* x, const T* weight, T* y, float* rstd, int64_t channels, float eps) {
  const T* row = x + block() * channels;
  float squares = 0.0F;
  for (int64_t j = thread(); j < channels; j += kThreads) squares += value_of(row[j]) * value_of(row[j]);
  const float scale = 1.0F / sqrtf(block_sum(squares) / static_cast<float>(channels) + eps);
  if (thread() == 0) rstd[block()] = scale;
  T* out = y + block() * channels;
  for (int64_t j = thread(); j < channels; j += kThreads) out[j] = rounded<T>(value_of(row[j]) * scale * value_of(weight[j]));
}

// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g n)).
template <class T>
__global__ void __launch_bounds__(kThreads)
    rms_norm_dx(const T* x, const T* weight, const float* rstd, const T* dy, T* dx, int64_t channels) {
  const int64_t first = block() * channels;
  const float scale = rstd[block()];
  float sum = 0.0F;
  for (int64_t j = thread(); j < channels; j += kThreads)
    sum += value_of(dy[first + j]) * value_of(weight[j]) * (value_of(x[first + j]) * scale);
  const float mean = block_sum(sum) / static_cast<float>(channels);
  for (int64_t j = thread(); j < channels; j += kThreads) {
    const float n = value_of(x[first + j]) * scale;
    dx[first + j] = rounded<T>(scale * (value_of(dy[first + j]) * value_of(weight[j]) - n * mean));
  }
}

template <class T>
struct RmsWeightTerm {  // of the gradient of the weight
  const T *x, *dy;
  const float* rstd;
  int64_t channels;

  __device__ float operator()(int64_t row, int64_t column) const {
    const int64_t at = row * channels + column;
    return value_of(dy[at]) * (value_of(x[at]) * rstd[row]);
  }
};

}  // namespace

void CudaBackend::execute(const RmsNormForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(rms_norm<T>, {k.x.dim(0), kThreads}, k.x.device_data<T>(), k.weight.device_data<T>(), k.y.device_data<T>(),
           k.rstd.device_data<float>(), k.x.dim(1), static_cast<float>(k.eps));
  });
}

void CudaBackend::execute(const RmsNormBackward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1), pieces = ceil_div(rows, kRowsOfPiece);
  const Tensor partials = empty(*this, Dtype::f32, {pieces * channels});
  with_values(k.x.dtype(), [&]<class T>() {
    const T *x = k.x.device_data<T>(), *dy = k.dy.device_data<T>();
    const float* rstd = k.rstd.device_data<float>();
    launch(rms_norm_dx<T>, {rows, kThreads}, x, k.weight.device_data<T>(), rstd, dy, k.dx.device_data<T>(), channels);
    launch(sum_pieces<RmsWeightTerm<T>>, {blocks_for(pieces * channels), kThreads}, RmsWeightTerm<T>{x, dy, rstd, channels}, rows, channels,
           partials.device_data<float>());
  });
  launch(add_pieces<float>, {blocks_for(channels), kThreads}, partials.device_data<float>(), pieces, channels,
         k.dweight.device_data<float>(), k.accumulate);
}

}  // namespace mantissa
