// RMS norm and layer norm. With n = (x - mean) * rstd: y = n * weight + bias, where an RMS norm has neither mean nor bias. With g = dy *
// weight: dx = rstd * (g - mean(g) - n * mean(g n)), dweight = sum of dy * n and dbias = sum of dy, where an RMS norm has no mean(g).
#include "backend/cuda/gemm/aligned.h"
#include "backend/cuda/rows/column_sums.h"

namespace mantissa::gpu {

// Operands that both passes read, rows of `weight.count` channels.
template <bool kLayerNorm, class T>
struct NormRows {
  Packs<const T> x, weight;
  int64_t count;
  float *mean, *rstd;

  __device__ float mean_of_row(int64_t row) const { return kLayerNorm ? mean[row] : 0.0F; }
};

}  // namespace mantissa::gpu

namespace mantissa {
namespace {

using namespace gpu;

template <class T>
__device__ Pack normalized(const Packs<const T>& x, int64_t first, float mean, float rstd) {
  Pack out = x.read(first);
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kPack; ++i) out.at[i] = (out.at[i] - mean) * rstd;
  return out;
}

// bias.values may be null.
template <bool kLayerNorm, class Team, class T>
__global__ void __launch_bounds__(kThreads) norm_forward(NormRows<kLayerNorm, T> k, Packs<const T> bias, Packs<T> y, float eps) {
  const int64_t row = Team::row(), channels = k.weight.count;
  if (row >= k.count) return;
  const Packs<const T> x = k.x.row(row);
  float mean = 0.0F, squares = 0.0F;
  if constexpr (kLayerNorm) {
    float sum = 0.0F;
    for_each_pack_of_row<Team>(channels, [&](int64_t first) {
      for (const float value : x.read(first).at) sum += value;
    });
    mean = Team::sum(sum) / static_cast<float>(channels);
  }
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    const Pack pack = x.read(first);
    float sum = kLayerNorm ? 0.0F : squares;  // a layer norm sums a pack by itself
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) sum += !kLayerNorm || first + i < channels ? (pack.at[i] - mean) * (pack.at[i] - mean) : 0.0F;
    squares = kLayerNorm ? squares + sum : sum;
  });
  const float scale = 1.0F / sqrtf(Team::sum(squares) / static_cast<float>(channels) + eps);
  for_each_pack_of_row<Team>(channels, [&](int64_t first) {
    Pack out = x.read(first);
    const Pack weight = k.weight.read(first), added = kLayerNorm && bias.values != nullptr ? bias.read(first) : Pack{};
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float scaled = (out.at[i] - mean) * scale * weight.at[i];
      out.at[i] = kLayerNorm && bias.values != nullptr ? scaled + added.at[i] : scaled;
    }
    y.row(row).write(first, out);
  });
  if (Team::rank() != 0) return;
  if (kLayerNorm) k.mean[row] = mean;
  k.rstd[row] = scale;
}

template <bool kLayerNorm, class Team, class T>
__global__ void __launch_bounds__(kThreads) norm_dx(NormRows<kLayerNorm, T> k, Packs<const T> all_dy, Packs<T> dx) {
  const int64_t row = Team::row();
  if (row >= k.count) return;
  const Packs<const T> x = k.x.row(row), dy = all_dy.row(row);
  const float mean = k.mean_of_row(row), scale = k.rstd[row];
  float sum_g = 0.0F, sum_gn = 0.0F;
  for_each_pack_of_row<Team>(k.weight.count, [&](int64_t first) {
    const Pack n = normalized(x, first, mean, scale), gradient = dy.read(first), weight = k.weight.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float g = gradient.at[i] * weight.at[i];
      sum_g += g;
      sum_gn += g * n.at[i];
    }
  });
  const auto channels = static_cast<float>(k.weight.count);
  const float mean_g = kLayerNorm ? Team::sum(sum_g) / channels : 0.0F, mean_gn = Team::sum(sum_gn) / channels;
  for_each_pack_of_row<Team>(k.weight.count, [&](int64_t first) {
    const Pack n = normalized(x, first, mean, scale), gradient = dy.read(first), weight = k.weight.read(first);
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = scale * (gradient.at[i] * weight.at[i] - mean_g - n.at[i] * mean_gn);
    dx.row(row).write(first, out);
  });
}

template <bool kLayerNorm, class T>
struct NormWeightTerm {  // term of the gradient of the weight
  NormRows<kLayerNorm, T> rows;
  Packs<const T> dy;

  __device__ Pack operator()(int64_t row, int64_t first) const {
    Pack out = normalized(rows.x.row(row), first, rows.mean_of_row(row), rows.rstd[row]);
    const Pack gradient = dy.row(row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] *= gradient.at[i];
    return out;
  }
};

// Calls body(p, n, dy, g) with the packs of a lane in a row. Those of long rows are loaded in halves.
template <unsigned kPacks, bool kLayerNorm, class T, class Body>
__device__ void for_each_pack_of_lane(const NormRows<kLayerNorm, T>& k, const T* all_dy, int64_t row, float mean, float rstd, Body body) {
  constexpr unsigned kAtOnce = kPacks > 4 ? kPacks / 2 : kPacks;
  MANTISSA_UNROLL
  for (unsigned first = 0; first < kPacks; first += kAtOnce) {
    const int64_t begin = first * kColumnsOfPacks, left = k.weight.count - begin, at = row * k.weight.count + begin;
    const PacksOfLane<T, kAtOnce> x(k.x.values + at, left), dy(all_dy + at, left);
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kAtOnce; ++p) {
      const Pack gradient = values_of(dy.at[p]);
      Pack n = values_of(x.at[p]),
           g = values_of(PacksOfLane<T, 1>(k.weight.values + begin + p * kColumnsOfPacks, left - p * kColumnsOfPacks).at[0]);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) {
        n.at[i] = (n.at[i] - mean) * rstd;
        g.at[i] *= gradient.at[i];
      }
      body(first + p, n, gradient, g);
    }
  }
}

// Blocks of a multiprocessor, so few that sharing its registers makes none spill.
constexpr unsigned blocks_of_norm(bool layer_norm, unsigned packs) {
  if (packs <= (layer_norm ? 1 : 2)) return 3;
  return packs <= (layer_norm ? 3 : 4) ? 2 : 1;
}

// All gradients in one pass, where rows are whole packs and all begin at multiples of 16 bytes. partials are [1 or 2, pieces, channels]:
// the sums over a piece of dweight and, in a layer norm, of dbias. A block has a piece of rows, of which each warp has every eighth one.
// The barrier keeps the compiler from holding a row, which it reads twice, in registers.
template <bool kLayerNorm, unsigned kPacks, class T>
__global__ void __launch_bounds__(kThreads, blocks_of_norm(kLayerNorm, kPacks))
    norm_backward(NormRows<kLayerNorm, T> k, const T* all_dy, T* all_dx, float* partials) {
  const int64_t columns = k.weight.count;
  Pack dweight[kPacks]{}, dbias[kPacks]{};
  const int64_t first_row = block() * kRowsOfPiece, end = first_row + kRowsOfPiece < k.count ? first_row + kRowsOfPiece : k.count;
  MANTISSA_UNROLL_BY(1)
  for (int64_t row = first_row + warp(); row < end; row += kWarpsOfBlock) {
    const float rstd = k.rstd[row], mean = k.mean_of_row(row);
    float sum_g = 0.0F, sum_gn = 0.0F;
    for_each_pack_of_lane<kPacks>(k, all_dy, row, mean, rstd, [&](unsigned p, const Pack& n, const Pack& dy, const Pack& g) {
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) {
        sum_g += g.at[i];
        sum_gn += g.at[i] * n.at[i];
        dweight[p].at[i] += dy.at[i] * n.at[i];
        dbias[p].at[i] += dy.at[i];
      }
    });
    const auto channels = static_cast<float>(columns);
    const float mean_g = kLayerNorm ? OfWarp::sum(sum_g) / channels : 0.0F, mean_gn = OfWarp::sum(sum_gn) / channels;
    warp_barrier();
    for_each_pack_of_lane<kPacks>(k, all_dy, row, mean, rstd, [&](unsigned p, const Pack& n, const Pack&, const Pack& g) {
      Pack dx;
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) dx.at[i] = rstd * (g.at[i] - mean_g - n.at[i] * mean_gn);
      if (column_of_lane(p) < columns) store(all_dx + row * columns + column_of_lane(p), rounded_pack<T>(dx));
    });
  }
  MANTISSA_UNROLL
  for (unsigned p = 0; p < kPacks; ++p) {
    const int64_t first = p * kColumnsOfPacks, left = columns - first;
    add_warps(dweight[p], left, partials + block() * columns + first);
    if (kLayerNorm) add_warps(dbias[p], left, partials + (blocks() + block()) * columns + first);
  }
}

// Packs of a lane that norm_backward() has registers for, at most.
template <bool kLayerNorm>
inline constexpr unsigned kMostPacksOfLane = kLayerNorm ? 6 : 8;

// Calls body(kernel) with the norm_backward() for rows of so many channels: with 1, 2, 3, 4, 6 or 8 packs of a lane.
template <bool kLayerNorm, class T, unsigned kPacks = 1, class Body>
void with_norm_backward(int64_t channels, const Body& body) {
  if constexpr (kPacks < kMostPacksOfLane<kLayerNorm>) {
    constexpr unsigned kMore = kPacks + (kPacks < 4 ? 1 : 2);
    if (channels > kPacks * kColumnsOfPacks) return with_norm_backward<kLayerNorm, T, kMore>(channels, body);
  }
  body(norm_backward<kLayerNorm, kPacks, T>);
}

}  // namespace

template <bool kLayerNorm>
void CudaBackend::normalize(const LayerNormForward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1);
  with_values(k.x.dtype(), [&]<class T>() {
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>(), *const bias = data_or_null<T>(k.bias);
    T* const y = k.y.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, bias, y)};
    const NormRows<kLayerNorm, T> all{of(x), of(weight), rows, data_or_null<float>(k.mean), k.rstd.device_data<float>()};
    with_team(rows, channels, [&]<class Team>(Grid grid) {
      launch(norm_forward<kLayerNorm, Team, T>, grid, all, of(bias), of(y), static_cast<float>(k.eps));
    });
  });
}

template <bool kLayerNorm>
void CudaBackend::differentiate_norm(const LayerNormBackward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1);
  float *const mean = data_or_null<float>(k.mean), *const rstd = k.rstd.device_data<float>();
  with_values(k.x.dtype(), [&]<class T>() {
    if (channels % kPack == 0 && channels <= kMostPacksOfLane<kLayerNorm> * kColumnsOfPacks) {
      const int64_t pieces = ceil_div(rows, kRowsOfPiece);
      const Tensor partials = empty(*this, Dtype::f32, {(kLayerNorm ? 2 : 1) * pieces * channels}), x = aligned(*this, k.x),
                   weight = aligned(*this, k.weight), dy = aligned(*this, k.dy), dx = aligned(*this, k.dx, Contents::overwritten);
      const NormRows<kLayerNorm, T> all{{x.device_data<T>(), channels, true}, {weight.device_data<T>(), channels, true}, rows, mean, rstd};
      with_norm_backward<kLayerNorm, T>(channels, [&](const auto kernel) {
        launch(kernel, {pieces, kThreads}, all, dy.device_data<T>(), dx.device_data<T>(), partials.device_data<float>());
      });
      copy_back(*this, dx, k.dx);
      return launch(add_pieces<float>, {(k.dbias.defined() ? 2 : 1) * grid_of_columns(channels).blocks, kThreads},
                    partials.device_data<float>(), pieces, channels, k.dweight.device_data<float>(), data_or_null<float>(k.dbias),
                    k.accumulate);
    }
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>(), *const dy = k.dy.device_data<T>();
    T* const dx = k.dx.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, dy, dx)};
    const NormRows<kLayerNorm, T> all{of(x), of(weight), rows, mean, rstd};
    with_team(rows, channels, [&]<class Team>(Grid grid) { launch(norm_dx<kLayerNorm, Team, T>, grid, all, of(dy), of(dx)); });
    sum_rows(NormWeightTerm<kLayerNorm, T>{all, of(dy)}, rows, channels, k.dweight, k.accumulate);
    if (k.dbias.defined()) sum_rows(RowTerm<T>{of(dy)}, rows, channels, k.dbias, k.accumulate);
  });
}

void CudaBackend::execute(const LayerNormForward& k) { normalize<true>(k); }
void CudaBackend::execute(const RmsNormForward& k) {
  normalize<false>({.x = k.x, .weight = k.weight, .y = k.y, .mean = {}, .rstd = k.rstd, .eps = k.eps});
}

void CudaBackend::execute(const LayerNormBackward& k) { differentiate_norm<true>(k); }
void CudaBackend::execute(const RmsNormBackward& k) {
  differentiate_norm<false>(
      {.x = k.x, .weight = k.weight, .mean = {}, .rstd = k.rstd, .dy = k.dy, .dx = k.dx, .dweight = k.dweight, .accumulate = k.accumulate});
}

}  // namespace mantissa
