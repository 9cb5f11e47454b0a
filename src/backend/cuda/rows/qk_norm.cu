#include "backend/cuda/gemm/aligned.h"
#include "backend/cuda/rows/column_sums.h"

namespace mantissa {
namespace {

using namespace gpu;

// A row of packed heads.
struct Heads {
  int64_t queries, normed, all;  // the first ones, counted in heads
  int64_t head_dim, row;

  explicit Heads(const HeadLayout& layout)
      : queries(layout.heads),
        normed(layout.heads + layout.kv_heads),
        all(layout.heads + 2 * layout.kv_heads),
        head_dim(layout.head_dim),
        row(layout.row()) {}
};

// A block has a row, and a warp every eighth head of it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    qk_norm(Heads k, const T* x, const T* q_weight, const T* k_weight, T* y, float* rstd, float eps) {
  for (int64_t head = warp(); head < k.all; head += kWarpsOfBlock) {
    const int64_t first = block() * k.row + head * k.head_dim;
    if (head >= k.normed) {
      for (int64_t j = lane(); j < k.head_dim; j += kWarp) y[first + j] = x[first + j];
      continue;
    }
    float squares = 0.0F;
    for (int64_t j = lane(); j < k.head_dim; j += kWarp) squares += value_of(x[first + j]) * value_of(x[first + j]);
    const float scale = 1.0F / sqrtf(join_warp(squares, Plus<float>()) / static_cast<float>(k.head_dim) + eps);
    const T* const weight = head < k.queries ? q_weight : k_weight;
    for (int64_t j = lane(); j < k.head_dim; j += kWarp) y[first + j] = rounded<T>(value_of(x[first + j]) * scale * value_of(weight[j]));
    if (lane() == 0) rstd[block() * k.normed + head] = scale;
  }
}

// With n = x * rstd and g = dy * weight: dx = rstd * (g - n * mean(g n)).
template <class T>
__global__ void __launch_bounds__(kThreads)
    qk_norm_dx(Heads k, const T* x, const T* q_weight, const T* k_weight, const float* rstd, const T* dy, T* dx) {
  for (int64_t head = warp(); head < k.all; head += kWarpsOfBlock) {
    const int64_t first = block() * k.row + head * k.head_dim;
    if (head >= k.normed) {
      for (int64_t j = lane(); j < k.head_dim; j += kWarp) dx[first + j] = dy[first + j];
      continue;
    }
    const T* const weight = head < k.queries ? q_weight : k_weight;
    const float scale = rstd[block() * k.normed + head];
    float sum = 0.0F;
    for (int64_t j = lane(); j < k.head_dim; j += kWarp)
      sum += value_of(dy[first + j]) * value_of(weight[j]) * (value_of(x[first + j]) * scale);
    const float mean = join_warp(sum, Plus<float>()) / static_cast<float>(k.head_dim);
    for (int64_t j = lane(); j < k.head_dim; j += kWarp) {
      const float n = value_of(x[first + j]) * scale;
      dx[first + j] = rounded<T>(scale * (value_of(dy[first + j]) * value_of(weight[j]) - n * mean));
    }
  }
}

// Rows of heads of kLanes packs, which begin at multiples of 16 bytes: a warp has several heads of a row at a time, kPacksAtOnce times
// over.
inline constexpr unsigned kPacksAtOnce = 3;

template <unsigned kLanes>
__device__ float sum_of_head(float value) {
  MANTISSA_UNROLL
  for (unsigned lanes = kLanes / 2; lanes > 0; lanes /= 2) value += shuffle_xor(value, lanes);
  return value;
}

// A lane has the same channels in all heads.
template <unsigned kLanes, class T>
__device__ Pack pack_of_head(const T* weight) {
  return values_of(load<PackInMemory<T>>(weight + lane() % kLanes * kPack));
}

template <unsigned kLanes, class T>
__global__ void __launch_bounds__(kThreads, 3)
    qk_norm_by_packs(Heads k, int64_t rows, const T* all_x, const T* q_weight, const T* k_weight, T* y, float* rstd, float eps) {
  constexpr unsigned kHeadDim = kLanes * kPack;
  const int64_t row = OfWarp::row();
  if (row >= rows) return;
  MANTISSA_UNROLL_BY(1)
  for (int64_t begin = 0; begin < k.row; begin += kPacksAtOnce * kColumnsOfPacks) {
    const HeldPacks<OfWarp, kPacksAtOnce, T> x(all_x + row * k.row + begin, static_cast<unsigned>(k.row - begin));
    MANTISSA_UNROLL
    for (unsigned p = 0; p < kPacksAtOnce; ++p) {
      const int64_t column = begin + column_of_lane(p), head = static_cast<uint32_t>(column) / kHeadDim;
      const Pack weight = pack_of_head<kLanes>(head < k.queries ? q_weight : k_weight);
      Pack out = values_of(x.at[p]);
      float squares = 0.0F;
      for (const float value : out.at) squares += value * value;
      const float scale = 1.0F / sqrtf(sum_of_head<kLanes>(squares) / kHeadDim + eps);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) out.at[i] = out.at[i] * scale * weight.at[i];
      if (head < k.normed)
        store_rounded(y + row * k.row + column, out);
      else if (head < k.all)
        store_wide(y + row * k.row + column, x.at[p]);
      if (head < k.normed && lane() % kLanes == 0) rstd[row * k.normed + head] = scale;
    }
  }
}

// Writes dx and the sums over a piece of rows, partials [2, pieces, head_dim] of both weights. A warp has every eighth row of a piece.
template <unsigned kLanes, class T>
__global__ void __launch_bounds__(kThreads, 2)
    qk_norm_backward_by_packs(Heads k, int64_t rows, const T* all_x, const T* q_weight, const T* k_weight, const float* rstd,
                              const T* all_dy, T* dx, float* partials) {
  constexpr unsigned kHeadDim = kLanes * kPack;
  Pack dqueries{}, dkeys{};
  const int64_t first_row = block() * kRowsOfPiece, end = first_row + kRowsOfPiece < rows ? first_row + kRowsOfPiece : rows;
  MANTISSA_UNROLL_BY(1)
  for (int64_t row = first_row + warp(); row < end; row += kWarpsOfBlock) {
    MANTISSA_UNROLL_BY(1)
    for (int64_t begin = 0; begin < k.row; begin += kPacksAtOnce * kColumnsOfPacks) {
      const int64_t at = row * k.row + begin;
      const auto left = static_cast<unsigned>(k.row - begin);
      const HeldPacks<OfWarp, kPacksAtOnce, T> x(all_x + at, left), dy(all_dy + at, left);
      float scales[kPacksAtOnce];
      MANTISSA_UNROLL
      for (unsigned p = 0; p < kPacksAtOnce; ++p) {
        const int64_t head = static_cast<uint32_t>(begin + column_of_lane(p)) / kHeadDim;
        scales[p] = head < k.normed ? rstd[row * k.normed + head] : 0.0F;
      }
      MANTISSA_UNROLL
      for (unsigned p = 0; p < kPacksAtOnce; ++p) {
        const int64_t head = static_cast<uint32_t>(begin + column_of_lane(p)) / kHeadDim;
        const Pack gradient = values_of(dy.at[p]), weight = pack_of_head<kLanes>(head < k.queries ? q_weight : k_weight);
        Pack n = values_of(x.at[p]), out;
        float sum = 0.0F;
        MANTISSA_UNROLL
        for (unsigned i = 0; i < kPack; ++i) {
          n.at[i] *= scales[p];
          out.at[i] = gradient.at[i] * weight.at[i];
          sum += out.at[i] * n.at[i];
          const float term = gradient.at[i] * n.at[i];
          dqueries.at[i] += head < k.queries ? term : 0.0F;
          dkeys.at[i] += head >= k.queries && head < k.normed ? term : 0.0F;
        }
        const float mean = sum_of_head<kLanes>(sum) / kHeadDim;
        MANTISSA_UNROLL
        for (unsigned i = 0; i < kPack; ++i) out.at[i] = scales[p] * (out.at[i] - n.at[i] * mean);
        if (head < k.normed)
          store_rounded(dx + at + column_of_lane(p), out);
        else if (head < k.all)
          store_wide(dx + at + column_of_lane(p), dy.at[p]);
      }
    }
  }
  for (unsigned lanes = kLanes; lanes < kWarp; lanes *= 2) {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      dqueries.at[i] += shuffle_xor(dqueries.at[i], lanes);
      dkeys.at[i] += shuffle_xor(dkeys.at[i], lanes);
    }
  }
  add_warps(dqueries, 0, 1, 0, kHeadDim, partials + block() * kHeadDim);
  add_warps(dkeys, 0, 1, 0, kHeadDim, partials + (blocks() + block()) * kHeadDim);
}

// Calls body.operator()<kLanes>() if heads of so many channels are those of the kernels above; returns whether they are.
template <class Body>
bool with_lanes_of_head(int64_t head_dim, const Body& body) {
  if (head_dim == 8 * kPack) body.template operator()<8>();
  if (head_dim == 16 * kPack) body.template operator()<16>();
  return head_dim == 8 * kPack || head_dim == 16 * kPack;
}

// The term of the gradient of a weight, for the channels of all heads that it scales.
template <class T>
struct HeadsWeightTerm {
  Heads heads;
  const T *x, *dy;
  const float* rstd;
  int64_t first_head, columns;
  bool aligned;

  __device__ Pack operator()(int64_t row, int64_t first) const {
    const int64_t at = row * heads.row + first_head * heads.head_dim;
    const float* const scales = rstd + row * heads.normed + first_head;
    Pack out = Packs<const T>{x + at, columns, aligned}.read(first);
    const Pack gradient = Packs<const T>{dy + at, columns, aligned}.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const auto column = static_cast<uint32_t>(first + i < columns ? first + i : columns - 1);
      out.at[i] = gradient.at[i] * (out.at[i] * scales[column / static_cast<uint32_t>(heads.head_dim)]);
    }
    return out;
  }
};

}  // namespace

void CudaBackend::execute(const QkNormForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const bool by_packs = with_lanes_of_head(k.layout.head_dim, [&]<unsigned kLanes>() {
      const int64_t rows = k.x.dim(0);
      const Tensor x = aligned(*this, k.x), q_weight = aligned(*this, k.q_weight), k_weight = aligned(*this, k.k_weight),
                   y = aligned(*this, k.y, Contents::overwritten);
      launch(qk_norm_by_packs<kLanes, T>, {ceil_div(rows, int64_t{kWarpsOfBlock}), kThreads}, Heads(k.layout), rows, x.device_data<T>(),
             q_weight.device_data<T>(), k_weight.device_data<T>(), y.device_data<T>(), k.rstd.device_data<float>(),
             static_cast<float>(k.eps));
      copy_back(*this, y, k.y);
    });
    if (by_packs) return;
    launch(qk_norm<T>, {k.x.dim(0), kThreads}, Heads(k.layout), k.x.device_data<T>(), k.q_weight.device_data<T>(),
           k.k_weight.device_data<T>(), k.y.device_data<T>(), k.rstd.device_data<float>(), static_cast<float>(k.eps));
  });
}

void CudaBackend::execute(const QkNormBackward& k) {
  const Heads heads(k.layout);
  const int64_t rows = k.x.dim(0), head_dim = heads.head_dim;
  // Sums over the rows of a piece; then, with a row for each head of each piece, over rows again.
  const auto sum_heads = [&]<class T>(int64_t first_head, int64_t count, const Tensor& out) {
    const int64_t columns = count * head_dim, pieces = ceil_div(rows, kRowsOfPiece);
    const Tensor partials = empty(*this, Dtype::f32, {pieces * columns});
    const T *const x = k.x.device_data<T>(), *const dy = k.dy.device_data<T>();
    const bool whole = begin_at_packs(heads.row, x, dy) && first_head * head_dim % kPack == 0;
    launch(sum_pieces<HeadsWeightTerm<T>>, grid_of_pieces(rows, columns),
           HeadsWeightTerm<T>{heads, x, dy, k.rstd.device_data<float>(), first_head, columns, whole}, rows, columns,
           partials.device_data<float>());
    sum_rows(RowTerm<float>{{partials.device_data<float>(), head_dim, head_dim % kPack == 0}}, pieces * count, head_dim, out, k.accumulate);
  };
  with_values(k.x.dtype(), [&]<class T>() {
    const bool by_packs = with_lanes_of_head(head_dim, [&]<unsigned kLanes>() {
      const int64_t pieces = ceil_div(rows, kRowsOfPiece);
      const Tensor x = aligned(*this, k.x), q_weight = aligned(*this, k.q_weight), k_weight = aligned(*this, k.k_weight),
                   dy = aligned(*this, k.dy), dx = aligned(*this, k.dx, Contents::overwritten),
                   partials = empty(*this, Dtype::f32, {2 * pieces * head_dim});
      launch(qk_norm_backward_by_packs<kLanes, T>, {pieces, kThreads}, heads, rows, x.device_data<T>(), q_weight.device_data<T>(),
             k_weight.device_data<T>(), k.rstd.device_data<float>(), dy.device_data<T>(), dx.device_data<T>(),
             partials.device_data<float>());
      copy_back(*this, dx, k.dx);
      launch(add_pieces<float>, {2 * grid_of_columns(head_dim).blocks, kThreads}, partials.device_data<float>(), pieces, head_dim,
             k.dq_weight.device_data<float>(), k.dk_weight.device_data<float>(), k.accumulate);
    });
    if (by_packs) return;
    launch(qk_norm_dx<T>, {rows, kThreads}, heads, k.x.device_data<T>(), k.q_weight.device_data<T>(), k.k_weight.device_data<T>(),
           k.rstd.device_data<float>(), k.dy.device_data<T>(), k.dx.device_data<T>());
    sum_heads.template operator()<T>(0, heads.queries, k.dq_weight);
    sum_heads.template operator()<T>(heads.queries, heads.normed - heads.queries, k.dk_weight);
  });
}

}  // namespace mantissa
