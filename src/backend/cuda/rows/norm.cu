#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/norm_backward.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// Operands that both passes read, rows of `weight.count` channels.
template <class T>
struct NormRows {
  Packs<const T> x, weight;
  int64_t count;
};

template <class Team, class T>
__global__ void __launch_bounds__(kThreads) rms_norm(NormRows<T> k, Packs<T> y, float* rstd, float eps) {
  const int64_t row = Team::row(), channels = k.weight.count;
  if (row >= k.count) return;
  const Packs<const T> x = k.x.row(row);
  float squares = 0.0F;
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    for (const float value : x.read(first).at) squares += value * value;
  });
  const float scale = 1.0F / sqrtf(Team::sum(squares) / static_cast<float>(channels) + eps);
  if (Team::rank() == 0) rstd[row] = scale;
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    Pack out = x.read(first);
    const Pack weight = k.weight.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = out.at[i] * scale * weight.at[i];
    y.row(row).write(first, out);
  });
}

// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g n)).
template <class Team, class T>
__global__ void __launch_bounds__(kThreads) rms_norm_dx(NormRows<T> k, const float* rstd, Packs<const T> all_dy, Packs<T> dx) {
  const int64_t row = Team::row(), channels = k.weight.count;
  if (row >= k.count) return;
  const Packs<const T> x = k.x.row(row), dy = all_dy.row(row);
  const float scale = rstd[row];
  float sum = 0.0F;
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    const Pack own = x.read(first), gradient = dy.read(first), weight = k.weight.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) sum += gradient.at[i] * weight.at[i] * (own.at[i] * scale);
  });
  const float mean = Team::sum(sum) / static_cast<float>(channels);
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    const Pack own = x.read(first), gradient = dy.read(first), weight = k.weight.read(first);
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = scale * (gradient.at[i] * weight.at[i] - own.at[i] * scale * mean);
    dx.row(row).write(first, out);
  });
}

template <class T>
struct RmsWeightTerm {  // term of the gradient of the weight
  NormRows<T> rows;
  Packs<const T> dy;
  const float* rstd;

  __device__ Pack operator()(int64_t row, int64_t first) const {
    const float scale = rstd[row];
    Pack out = rows.x.row(row).read(first);
    const Pack gradient = dy.row(row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = gradient.at[i] * (out.at[i] * scale);
    return out;
  }
};

}  // namespace

void CudaBackend::execute(const RmsNormForward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1);
  with_values(k.x.dtype(), [&]<class T>() {
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>();
    T* const y = k.y.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, y)};
    with_team(rows, channels, [&]<class Team>(Grid grid) {
      launch(rms_norm<Team, T>, grid, NormRows<T>{of(x), of(weight), rows}, of(y), k.rstd.device_data<float>(), static_cast<float>(k.eps));
    });
  });
}

void CudaBackend::execute(const RmsNormBackward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1), pieces = ceil_div(rows, kRowsOfPiece);
  const Tensor partials = empty(*this, Dtype::f32, {pieces * channels});
  const auto launch_kernel = [&](const auto kernel, Grid grid, const auto& all) { launch(kernel, grid, all); };
  with_values(k.x.dtype(), [&]<class T>() {
    if (fits_norm_backward<false>(channels)) return launch_norm_backward<false, T>(*this, k, partials, launch_kernel);
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>(), *const dy = k.dy.device_data<T>();
    T* const dx = k.dx.device_data<T>();
    const float* const rstd = k.rstd.device_data<float>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, dy, dx)};
    const NormRows<T> all{of(x), of(weight), rows};
    with_team(rows, channels, [&]<class Team>(Grid grid) { launch(rms_norm_dx<Team, T>, grid, all, rstd, of(dy), of(dx)); });
    launch(sum_pieces<RmsWeightTerm<T>>, grid_of_pieces(rows, channels), RmsWeightTerm<T>{all, of(dy), rstd}, rows, channels,
           partials.device_data<float>());
  });
  launch(add_pieces<float>, grid_of_columns(channels), partials.device_data<float>(), pieces, channels, k.dweight.device_data<float>(),
         k.accumulate);
}

}  // namespace mantissa
