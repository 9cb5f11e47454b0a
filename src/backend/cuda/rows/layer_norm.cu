#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/norm_backward.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// Operands that both passes read, rows of `weight.count` channels.
template <class T>
struct LayerNormRows {
  Packs<const T> x, weight;
  int64_t count;
  float *mean, *rstd;

  __device__ Pack normalized(int64_t row, int64_t first) const {
    Pack out = x.row(row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = (out.at[i] - mean[row]) * rstd[row];
    return out;
  }
};

// The squared distance of a pack from the mean, over the elements that are there.
__device__ float squares_around(const Pack& pack, float mean, int64_t there) {
  float squares = 0.0F;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) squares += i < there ? (pack.at[i] - mean) * (pack.at[i] - mean) : 0.0F;
  return squares;
}

// bias.values may be null.
template <class Team, class T>
__global__ void __launch_bounds__(kThreads) layer_norm(LayerNormRows<T> k, Packs<const T> bias, Packs<T> y, float eps) {
  const int64_t row = Team::row(), channels = k.weight.count;
  if (row >= k.count) return;
  const Packs<const T> x = k.x.row(row);
  float sum = 0.0F, squares = 0.0F;
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    for (const float value : x.read(first).at) sum += value;
  });
  const float mean = Team::sum(sum) / static_cast<float>(channels);
  for_each_pack_of_row<Team>(channels, [&](int64_t first) { squares += squares_around(x.read(first), mean, channels - first); });
  const float scale = 1.0F / sqrtf(Team::sum(squares) / static_cast<float>(channels) + eps);
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    Pack out = x.read(first);
    const Pack weight = k.weight.read(first), added = bias.values != nullptr ? bias.read(first) : Pack{};
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float scaled = (out.at[i] - mean) * scale * weight.at[i];
      out.at[i] = bias.values != nullptr ? scaled + added.at[i] : scaled;
    }
    y.row(row).write(first, out);
  });
  if (Team::rank() != 0) return;
  k.mean[row] = mean;
  k.rstd[row] = scale;
}

// With n = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - mean(g) - n * mean(g n)).
template <class Team, class T>
__global__ void __launch_bounds__(kThreads) layer_norm_dx(LayerNormRows<T> k, Packs<const T> all_dy, Packs<T> dx) {
  const int64_t row = Team::row();
  if (row >= k.count) return;
  const Packs<const T> dy = all_dy.row(row);
  float sum_g = 0.0F, sum_gn = 0.0F;
  for_each_pack_of_row<Team>(k.weight.count, [&](int64_t first) {
    const Pack n = k.normalized(row, first), gradient = dy.read(first), weight = k.weight.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float g = gradient.at[i] * weight.at[i];
      sum_g += g;
      sum_gn += g * n.at[i];
    }
  });
  const auto channels = static_cast<float>(k.weight.count);
  const float mean_g = Team::sum(sum_g) / channels, mean_gn = Team::sum(sum_gn) / channels, scale = k.rstd[row];
  for_each_pack_of_row<Team>(k.weight.count, [&](int64_t first) {
    const Pack n = k.normalized(row, first), gradient = dy.read(first), weight = k.weight.read(first);
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = scale * (gradient.at[i] * weight.at[i] - mean_g - n.at[i] * mean_gn);
    dx.row(row).write(first, out);
  });
}

template <class T>
struct WeightTerm {  // term of the gradient of the weight
  LayerNormRows<T> rows;
  Packs<const T> dy;

  __device__ Pack operator()(int64_t row, int64_t first) const {
    Pack out = rows.normalized(row, first);
    const Pack gradient = dy.row(row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] *= gradient.at[i];
    return out;
  }
};

template <class T>
struct BiasTerm {  // term of the gradient of the bias
  Packs<const T> dy;

  __device__ Pack operator()(int64_t row, int64_t first) const { return dy.row(row).read(first); }
};

}  // namespace

void CudaBackend::execute(const LayerNormForward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1);
  with_values(k.x.dtype(), [&]<class T>() {
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>(), *const bias = data_or_null<T>(k.bias);
    T* const y = k.y.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, bias, y)};
    const LayerNormRows<T> all{of(x), of(weight), rows, k.mean.device_data<float>(), k.rstd.device_data<float>()};
    with_team(rows, channels,
              [&]<class Team>(Grid grid) { launch(layer_norm<Team, T>, grid, all, of(bias), of(y), static_cast<float>(k.eps)); });
  });
}

void CudaBackend::execute(const LayerNormBackward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1), pieces = ceil_div(rows, kRowsOfPiece);
  const Tensor partials = empty(*this, Dtype::f32, {2 * pieces * channels});
  const auto launch_kernel = [&](const auto kernel, Grid grid, const auto& all) { launch(kernel, grid, all); };
  const auto sum_rows = [&]<class Term>(const Term& term, const Tensor& out) {
    launch(sum_pieces<Term>, grid_of_pieces(rows, channels), term, rows, channels, partials.device_data<float>());
    launch(add_pieces<float>, grid_of_columns(channels), partials.device_data<float>(), pieces, channels, out.device_data<float>(),
           k.accumulate);
  };
  with_values(k.x.dtype(), [&]<class T>() {
    if (fits_norm_backward<true>(channels)) {
      launch_norm_backward<true, T>(*this, k, partials, launch_kernel);
      return launch(add_pieces_of_two<float>, {(k.dbias.defined() ? 2 : 1) * grid_of_columns(channels).blocks, kThreads},
                    partials.device_data<float>(), pieces, channels, k.dweight.device_data<float>(), data_or_null<float>(k.dbias),
                    k.accumulate);
    }
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>(), *const dy = k.dy.device_data<T>();
    T* const dx = k.dx.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, dy, dx)};
    const LayerNormRows<T> all{of(x), of(weight), rows, k.mean.device_data<float>(), k.rstd.device_data<float>()};
    with_team(rows, channels, [&]<class Team>(Grid grid) { launch(layer_norm_dx<Team, T>, grid, all, of(dy), of(dx)); });
    sum_rows(WeightTerm<T>{all, of(dy)}, k.dweight);
    if (k.dbias.defined()) sum_rows(BiasTerm<T>{of(dy)}, k.dbias);
  });
}

}  // namespace mantissa
