// RMS norm and layer norm. With n = (x - mean) * rstd: y = n * weight + bias, where an RMS norm has neither mean nor bias. With g = dy *
// weight: dx = rstd * (g - mean(g) - n * mean(g n)), dweight = sum of dy * n and dbias = sum of dy, where an RMS norm has no mean(g).
#include "backend/cuda/gemm/aligned.h"
#include "backend/cuda/rows/column_sums.h"

namespace mantissa::gpu {

// Operands that both passes read, rows of `weight.count` channels.
template <bool kLayerNorm, bool kWhole, class T>
struct NormRows {
  Packs<const T, kWhole> x, weight;
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

// bias.values and branch may be null; with a branch, a thread holds its packs.
template <bool kLayerNorm, class Team, unsigned kPacks, class T, bool kWhole = kPacks != 0>
__global__ void __launch_bounds__(kThreads)
    norm_forward(NormRows<kLayerNorm, kWhole, T> k, Packs<const T, kWhole> bias, Packs<T, kWhole> y, float eps, const T* branch, T* sums) {
  const int64_t row = Team::row(), channels = k.weight.count;
  if (row >= k.count) return;
  TeamRow<Team, kPacks, T> x{k.x.row(row)};
  if constexpr (kPacks != 0) {
    if (branch != nullptr) x.add(branch + row * channels, sums + row * channels);
  }
  float mean = 0.0F, squares = 0.0F;
  if constexpr (kLayerNorm) {
    float sum = 0.0F;
    x.for_each([&](int64_t, const Pack& pack) {
      for (const float value : pack.at) sum += value;
    });
    mean = Team::sum(sum) / static_cast<float>(channels);
  }
  x.for_each([&](int64_t first, const Pack& pack) {
    float sum = 0.0F;  // a pack is summed by itself
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float centered = kWhole || first + i < channels ? pack.at[i] - mean : 0.0F;
      sum = multiply_add(centered, centered, sum);
    }
    squares += sum;
  });
  const float scale = 1.0F / sqrtf(Team::sum(squares) / static_cast<float>(channels) + eps);
  x.for_each([&](int64_t first, const Pack& pack) {
    const Pack weight = k.weight.read_constant(first), added = kLayerNorm && bias.values != nullptr ? bias.read_constant(first) : Pack{};
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float n = (pack.at[i] - mean) * scale;
      out.at[i] = kLayerNorm && bias.values != nullptr ? multiply_add(n, weight.at[i], added.at[i]) : n * weight.at[i];
    }
    y.row(row).write(first, out);
  });
  if (Team::rank() != 0) return;
  if (kLayerNorm) k.mean[row] = mean;
  k.rstd[row] = scale;
}

// Where rows are ragged or long; a block has one.
template <bool kLayerNorm, class T>
__global__ void __launch_bounds__(kThreads) norm_dx(NormRows<kLayerNorm, false, T> k, Packs<const T> all_dy, Packs<T> dx) {
  const int64_t row = block();
  const Packs<const T> x = k.x.row(row), dy = all_dy.row(row);
  const float mean = k.mean_of_row(row), scale = k.rstd[row];
  float sum_g = 0.0F, sum_gn = 0.0F;
  for_each_pack_of_row<OfBlock>(k.weight.count, [&](int64_t first) {
    const Pack n = normalized(x, first, mean, scale), gradient = dy.read(first), weight = k.weight.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const float g = gradient.at[i] * weight.at[i];
      sum_g += g;
      sum_gn += g * n.at[i];
    }
  });
  const auto channels = static_cast<float>(k.weight.count);
  const float mean_g = kLayerNorm ? OfBlock::sum(sum_g) / channels : 0.0F, mean_gn = OfBlock::sum(sum_gn) / channels;
  for_each_pack_of_row<OfBlock>(k.weight.count, [&](int64_t first) {
    const Pack n = normalized(x, first, mean, scale), gradient = dy.read(first), weight = k.weight.read(first);
    Pack out;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] = scale * (gradient.at[i] * weight.at[i] - mean_g - n.at[i] * mean_gn);
    dx.row(row).write(first, out);
  });
}

template <bool kLayerNorm, class T>
struct NormWeightTerm {  // term of the gradient of the weight
  NormRows<kLayerNorm, false, T> rows;
  Packs<const T> dy;

  __device__ Pack operator()(int64_t row, int64_t first) const {
    Pack out = normalized(rows.x.row(row), first, rows.mean_of_row(row), rows.rstd[row]);
    const Pack gradient = dy.row(row).read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) out.at[i] *= gradient.at[i];
    return out;
  }
};

// Sums of the warps of a block over their parts of rows. Two rows follow each other through them, so that one barrier a row suffices.
struct SumsOfRows {
  float of_g[2][kWarpsOfBlock], of_gn[2][kWarpsOfBlock];
};

// Blocks of a multiprocessor, by the registers for sums of columns, for x and dy, and for the rest.
constexpr unsigned blocks_of_norm(bool layer_norm, unsigned packs, size_t bytes_of_element) {
  const unsigned registers = packs * ((layer_norm ? 16 : 8) + 4 * static_cast<unsigned>(bytes_of_element)) + (layer_norm ? 48 : 32);
  return registers < 64 ? 4 : 65536 / kThreads / registers;
}

// All gradients in one pass, where rows are whole packs and all begin at multiples of 16 bytes. partials are [1 or 2, pieces, channels]:
// the sums over a piece of dweight and, in a layer norm, of dbias. A block has a piece of rows. A team of 2^team warps has a row at a time,
// each kPacks * kColumnsOfPacks columns of it, which its lanes hold. others may be null.
template <bool kLayerNorm, unsigned kPacks, class T>
__global__ void __launch_bounds__(kThreads, blocks_of_norm(kLayerNorm, kPacks, sizeof(T)))
    norm_backward(NormRows<kLayerNorm, true, T> k, const T* all_dy, const T* others, T* all_dx, float* partials, unsigned team) {
  auto& sums = block_shared<SumsOfRows>();
  const int64_t columns = k.weight.count, begin = (warp() & ((1U << team) - 1)) * kPacks * kColumnsOfPacks,
                first_row = block() * kRowsOfPiece, end = first_row + kRowsOfPiece < k.count ? first_row + kRowsOfPiece : k.count;
  const float share = 1.0F / static_cast<float>(columns);
  const unsigned own = begin < columns ? static_cast<unsigned>(columns - begin) : 0;
  Pack dweight[kPacks]{}, dbias[kPacks]{};
  unsigned turn = 0;
  MANTISSA_UNROLL_BY(1)
  for (int64_t first = first_row; first < end; first += kWarpsOfBlock >> team, turn = 1 - turn) {
    const int64_t row = first + (warp() >> team), at = row * columns + begin;
    const unsigned left = row < end ? own : 0;
    const HeldPacks<OfWarp, kPacks, T> x(k.x.values + at, left), dys(all_dy + at, left);
    const auto weight_of = [&](unsigned p) { return column_of_lane(p) < left ? k.weight.read(begin + column_of_lane(p)) : Pack{}; };
    const float rstd = left > 0 ? k.rstd[row] : 0.0F, mean = left > 0 ? k.mean_of_row(row) : 0.0F;
    float sum_g = 0.0F, sum_gn = 0.0F;
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kPacks; ++p) {
      const Pack values = values_of(x.at[p]), dy = values_of(dys.at[p]), weight = weight_of(p);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) {
        const float n = (values.at[i] - mean) * rstd, g = dy.at[i] * weight.at[i];
        sum_gn = multiply_add(g, n, sum_gn);
        dweight[p].at[i] = multiply_add(dy.at[i], n, dweight[p].at[i]);
        if (kLayerNorm) sum_g += g, dbias[p].at[i] += dy.at[i];
      }
    }
    sum_g = kLayerNorm ? OfWarp::sum(sum_g) : 0.0F, sum_gn = OfWarp::sum(sum_gn);
    if (team > 0) {
      if (lane() == 0) sums.of_g[turn][warp()] = sum_g, sums.of_gn[turn][warp()] = sum_gn;
      barrier();
      sum_g = sum_gn = 0.0F;
      MANTISSA_UNROLL_BY(1)
      for (unsigned w = warp() >> team << team, last = w + (1U << team); w < last; ++w)
        sum_g += sums.of_g[turn][w], sum_gn += sums.of_gn[turn][w];
    }
    const float mean_g = sum_g * share, slope = -sum_gn * share * rstd;
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kPacks; ++p) {
      const Pack values = values_of(x.at[p]), dy = values_of(dys.at[p]), weight = weight_of(p);
      Pack dx;
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) {
        const float g = kLayerNorm ? multiply_add(dy.at[i], weight.at[i], -mean_g) : dy.at[i] * weight.at[i];
        dx.at[i] = rstd * multiply_add(values.at[i] - mean, slope, g);
      }
      if (column_of_lane(p) >= left) continue;
      if (others != nullptr) dx = sum_of(values_of(rounded_pack<T>(dx)), values_of(load<PackInMemory<T>>(others + at + column_of_lane(p))));
      store_rounded(all_dx + at + column_of_lane(p), dx);
    }
  }
  MANTISSA_UNROLL
  for (unsigned p = 0; p < kPacks; ++p) {
    add_warps(dweight[p], team, kPacks, p, columns, partials + block() * columns);
    if (kLayerNorm) add_warps(dbias[p], team, kPacks, p, columns, partials + (blocks() + block()) * columns);
  }
}

// The most columns of a warp in norm_backward().
template <bool kLayerNorm>
constexpr int64_t kColumnsOfPart = (kLayerNorm ? 3 : 4) * kColumnsOfPacks;

// Calls body(kernel, team) with the norm_backward() for rows of so many channels.
template <bool kLayerNorm, class T, unsigned kPacks = 1, class Body>
void with_norm_backward(int64_t channels, const Body& body) {
  unsigned team = 0;
  while (kColumnsOfPart<kLayerNorm> << team < channels) ++team;
  if constexpr (kPacks * kColumnsOfPacks < kColumnsOfPart<kLayerNorm>) {
    if (channels > kPacks * kColumnsOfPacks << team) return with_norm_backward<kLayerNorm, T, kPacks + 1>(channels, body);
  }
  body(norm_backward<kLayerNorm, kPacks, T>, team);
}

}  // namespace

template <bool kLayerNorm>
void CudaBackend::normalize(const LayerNormForward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1);
  const bool whole = channels % kPack == 0;
  if (k.sum.defined() && !holds_row(channels)) {
    execute(Add{.a = k.x, .b = k.branch, .out = k.sum});
    return normalize<kLayerNorm>({.x = k.sum, .weight = k.weight, .y = k.y, .mean = k.mean, .rstd = k.rstd, .eps = k.eps, .bias = k.bias});
  }
  const auto at_packs = [&](const Tensor& x, Contents contents) { return whole && x.defined() ? aligned(*this, x, contents) : x; };
  const Tensor x = at_packs(k.x, Contents::read), weight = at_packs(k.weight, Contents::read), bias = at_packs(k.bias, Contents::read),
               branch = at_packs(k.branch, Contents::read), y = at_packs(k.y, Contents::overwritten),
               sum = at_packs(k.sum, Contents::overwritten);
  with_values(x.dtype(), [&]<class T>() {
    with_held_rows(rows, channels, [&]<class Team, unsigned kPacks>(Grid grid) {
      constexpr bool kWhole = kPacks != 0;
      using Read = Packs<const T, kWhole>;
      const NormRows<kLayerNorm, kWhole, T> both{.x = {x.device_data<T>(), channels, whole},
                                                 .weight = {weight.device_data<T>(), channels, whole},
                                                 .count = rows,
                                                 .mean = data_or_null<float>(k.mean),
                                                 .rstd = k.rstd.device_data<float>()};
      launch(norm_forward<kLayerNorm, Team, kPacks, T>, grid, both, Read{data_or_null<T>(bias), channels, whole},
             Packs<T, kWhole>{y.device_data<T>(), channels, whole}, static_cast<float>(k.eps), data_or_null<T>(branch),
             data_or_null<T>(sum));
    });
  });
  copy_back(*this, y, k.y);
  if (sum.defined()) copy_back(*this, sum, k.sum);
}

template <bool kLayerNorm>
void CudaBackend::differentiate_norm(const LayerNormBackward& k) {
  const int64_t rows = k.x.dim(0), channels = k.x.dim(1);
  float *const mean = data_or_null<float>(k.mean), *const rstd = k.rstd.device_data<float>();
  with_values(k.x.dtype(), [&]<class T>() {
    if (channels % kPack == 0 && channels <= kWarpsOfBlock * kColumnsOfPart<kLayerNorm>) {
      const int64_t pieces = ceil_div(rows, kRowsOfPiece);
      const Tensor partials = empty(*this, Dtype::f32, {(kLayerNorm ? 2 : 1) * pieces * channels}), x = aligned(*this, k.x),
                   weight = aligned(*this, k.weight), dy = aligned(*this, k.dy), dx = aligned(*this, k.dx, Contents::overwritten),
                   other = k.other.defined() ? aligned(*this, k.other) : k.other;
      const NormRows<kLayerNorm, true, T> all{
          {x.device_data<T>(), channels, true}, {weight.device_data<T>(), channels, true}, rows, mean, rstd};
      with_norm_backward<kLayerNorm, T>(channels, [&](const auto kernel, unsigned team) {
        launch(kernel, {pieces, kThreads}, all, dy.device_data<T>(), data_or_null<T>(other), dx.device_data<T>(),
               partials.device_data<float>(), team);
      });
      copy_back(*this, dx, k.dx);
      return launch(add_pieces<float>, {(k.dbias.defined() ? 2 : 1) * grid_of_columns(channels).blocks, kThreads},
                    partials.device_data<float>(), pieces, channels, k.dweight.device_data<float>(), data_or_null<float>(k.dbias),
                    k.accumulate);
    }
    const T *const x = k.x.device_data<T>(), *const weight = k.weight.device_data<T>(), *const dy = k.dy.device_data<T>();
    T* const dx = k.dx.device_data<T>();
    const RowPacks of{channels, begin_at_packs(channels, x, weight, dy, dx)};
    const NormRows<kLayerNorm, false, T> all{of(x), of(weight), rows, mean, rstd};
    launch(norm_dx<kLayerNorm, T>, {rows, kThreads}, all, of(dy), of(dx));
    sum_rows(NormWeightTerm<kLayerNorm, T>{all, of(dy)}, rows, channels, k.dweight, k.accumulate);
    if (k.dbias.defined()) sum_rows(RowTerm<T>{of(dy)}, rows, channels, k.dbias, k.accumulate);
    if (k.other.defined()) execute(Add{.a = k.other, .b = k.dx, .out = k.dx});
  });
}

void CudaBackend::execute(const LayerNormForward& k) { normalize<true>(k); }
void CudaBackend::execute(const RmsNormForward& k) {
  normalize<false>({.x = k.x, .weight = k.weight, .y = k.y, .mean = {}, .rstd = k.rstd, .eps = k.eps, .branch = k.branch, .sum = k.sum});
}

void CudaBackend::execute(const LayerNormBackward& k) { differentiate_norm<true>(k); }
void CudaBackend::execute(const RmsNormBackward& k) {
  differentiate_norm<false>({.x = k.x,
                             .weight = k.weight,
                             .mean = {},
                             .rstd = k.rstd,
                             .dy = k.dy,
                             .dx = k.dx,
                             .dweight = k.dweight,
                             .accumulate = k.accumulate,
                             .other = k.other});
}

}  // namespace mantissa
