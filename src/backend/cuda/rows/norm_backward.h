// The gradients of a norm in one pass over its rows: dx, and the sums over pieces of rows of those of weight and bias.
#pragma once

#include "backend/cuda/gemm/aligned.h"
#include "backend/cuda/rows/column_sums.h"

namespace mantissa::gpu {

// Rows of whole packs, all of which begin at multiples of 16 bytes.
template <class T>
struct NormGradients {
  const T *x, *weight, *dy;
  const float *mean, *rstd;  // mean: of a layer norm
  T* dx;
  float* partials;  // [1 or 2, pieces, channels] of the weight and, in a layer norm, of the bias
  int64_t rows, channels;
};

// Calls body(p, n, dy, g) with the packs of a lane in a row, of n = (x - mean) * rstd, dy and g = dy * weight. Those of long rows are
// loaded in halves.
template <unsigned kPacks, class T, class Body>
__device__ inline void for_each_pack_of_lane(const NormGradients<T>& k, int64_t row, float mean, float rstd, Body body) {
  constexpr unsigned kAtOnce = kPacks > 4 ? kPacks / 2 : kPacks;
  MANTISSA_UNROLL
  for (unsigned first = 0; first < kPacks; first += kAtOnce) {
    const int64_t begin = first * kColumnsOfPacks, left = k.channels - begin;
    const PacksOfLane<T, kAtOnce> x(k.x + row * k.channels + begin, left), dy(k.dy + row * k.channels + begin, left);
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kAtOnce; ++p) {
      const Pack gradient = values_of(dy.at[p]);
      Pack n = values_of(x.at[p]),
           g = values_of(PacksOfLane<T, 1>(k.weight + begin + p * kColumnsOfPacks, left - p * kColumnsOfPacks).at[0]);
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

// dx = rstd * (g - mean(g) - n * mean(g n)), dweight = sum of dy * n, dbias = sum of dy. An RMS norm has neither mean. A block has a piece
// of rows, of which each warp has every eighth one; the barrier keeps the compiler from holding a row, which it reads twice, in registers.
template <bool kLayerNorm, unsigned kPacks, class T>
__global__ void __launch_bounds__(kThreads, blocks_of_norm(kLayerNorm, kPacks)) norm_backward(NormGradients<T> k) {
  Pack dweight[kPacks]{}, dbias[kPacks]{};
  const int64_t first_row = block() * kRowsOfPiece, end = first_row + kRowsOfPiece < k.rows ? first_row + kRowsOfPiece : k.rows;
  MANTISSA_UNROLL_BY(1)
  for (int64_t row = first_row + warp(); row < end; row += kWarpsOfBlock) {
    const float rstd = k.rstd[row], mean = kLayerNorm ? k.mean[row] : 0.0F;
    float sum_g = 0.0F, sum_gn = 0.0F;
    for_each_pack_of_lane<kPacks>(k, row, mean, rstd, [&](unsigned p, const Pack& n, const Pack& dy, const Pack& g) {
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) {
        sum_g += g.at[i];
        sum_gn += g.at[i] * n.at[i];
        dweight[p].at[i] += dy.at[i] * n.at[i];
        dbias[p].at[i] += dy.at[i];
      }
    });
    const auto channels = static_cast<float>(k.channels);
    const float mean_g = kLayerNorm ? OfWarp::sum(sum_g) / channels : 0.0F, mean_gn = OfWarp::sum(sum_gn) / channels;
    warp_barrier();
    for_each_pack_of_lane<kPacks>(k, row, mean, rstd, [&](unsigned p, const Pack& n, const Pack&, const Pack& g) {
      Pack dx;
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) dx.at[i] = rstd * (g.at[i] - mean_g - n.at[i] * mean_gn);
      if (column_of_lane(p) < k.channels) store(k.dx + row * k.channels + column_of_lane(p), rounded_pack<T>(dx));
    });
  }
  MANTISSA_UNROLL
  for (unsigned p = 0; p < kPacks; ++p) {
    const int64_t first = p * kColumnsOfPacks, left = k.channels - first;
    add_warps(dweight[p], left, k.partials + block() * k.channels + first);
    if (kLayerNorm) add_warps(dbias[p], left, k.partials + (blocks() + block()) * k.channels + first);
  }
}

// Packs of a lane that norm_backward() has registers for, at most.
template <bool kLayerNorm>
inline constexpr unsigned kMostPacksOfLane = kLayerNorm ? 6 : 8;
template <bool kLayerNorm>
bool fits_norm_backward(int64_t channels) {
  return channels % kPack == 0 && channels <= kMostPacksOfLane<kLayerNorm> * kColumnsOfPacks;
}

// Calls body(kernel) with the norm_backward() for rows of so many channels: with 1, 2, 3, 4, 6 or 8 packs of a lane.
template <bool kLayerNorm, class T, unsigned kPacks = 1, class Body>
void with_norm_backward(int64_t channels, const Body& body) {
  if constexpr (kPacks < kMostPacksOfLane<kLayerNorm>) {
    constexpr unsigned kMore = kPacks + (kPacks < 4 ? 1 : 2);
    if (channels > kPacks * kColumnsOfPacks) return with_norm_backward<kLayerNorm, T, kMore>(channels, body);
  }
  body(norm_backward<kLayerNorm, kPacks, T>);
}

// Calls launch(kernel, grid, gradients) with the norm_backward() of RmsNormBackward or LayerNormBackward.
template <bool kLayerNorm, class T, class Norm, class Launch>
void launch_norm_backward(Backend& device, const Norm& k, const Tensor& partials, const Launch& launch) {
  const Tensor x = aligned(device, k.x, Contents::read), weight = aligned(device, k.weight, Contents::read),
               dy = aligned(device, k.dy, Contents::read), dx = aligned(device, k.dx, Contents::overwritten);
  NormGradients<T> all{.x = x.device_data<T>(),
                       .weight = weight.device_data<T>(),
                       .dy = dy.device_data<T>(),
                       .mean = nullptr,
                       .rstd = k.rstd.template device_data<float>(),
                       .dx = dx.device_data<T>(),
                       .partials = partials.device_data<float>(),
                       .rows = k.x.dim(0),
                       .channels = k.x.dim(1)};
  if constexpr (kLayerNorm) all.mean = k.mean.template device_data<float>();
  with_norm_backward<kLayerNorm, T>(all.channels, [&](const auto kernel) {
    launch(kernel, Grid{ceil_div(all.rows, kRowsOfPiece), kThreads}, all);
  });
  copy_back(device, dx, k.dx);
}

}  // namespace mantissa::gpu
