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

// to[i, j] = from[i, j] for j < cols; rows are so long.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_columns(const T* from, int64_t row_of_from, T* to, int64_t row_of_to, int64_t rows, int64_t cols) {
  for_each_element(rows * cols, [=](int64_t i) { to[i / cols * row_of_to + i % cols] = from[i / cols * row_of_from + i % cols]; });
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

}  // namespace

void CudaBackend::copy_columns(const Tensor& from, int64_t first, const Tensor& to, int64_t first_of_to, int64_t rows, int64_t cols) {
  if (rows == 0) return;
  with_values(from.dtype(), [&]<class T>() {
    launch(mantissa::copy_columns<T>, {blocks_for(rows * cols), kThreads}, from.device_data<T>() + first, from.elements() / rows,
           to.device_data<T>() + first_of_to, to.elements() / rows, rows, cols);
  });
}

// Heads of other sizes are rows of the norms of whole rows.
void CudaBackend::execute(const QkNormForward& k) {
  const Heads heads(k.layout);
  const int64_t rows = k.x.dim(0), head_dim = heads.head_dim;
  const auto normalize_heads = [&](int64_t first, int64_t count, const Tensor& weight) {
    const int64_t begin = first * head_dim, cols = count * head_dim;
    const Tensor x = empty(*this, k.x.dtype(), {rows * count, head_dim}), y = empty_like(x),
                 rstd = empty(*this, k.rstd.dtype(), {rows * count});
    copy_columns(k.x, begin, x, 0, rows, cols);
    execute(RmsNormForward{.x = x, .weight = weight, .y = y, .rstd = rstd, .eps = k.eps});
    copy_columns(y, 0, k.y, begin, rows, cols);
    copy_columns(rstd, 0, k.rstd, first, rows, count);
  };
  with_values(k.x.dtype(), [&]<class T>() {
    const bool by_packs = with_lanes_of_head(head_dim, [&]<unsigned kLanes>() {
      const Tensor x = aligned(*this, k.x), q_weight = aligned(*this, k.q_weight), k_weight = aligned(*this, k.k_weight),
                   y = aligned(*this, k.y, Contents::overwritten);
      launch(qk_norm_by_packs<kLanes, T>, {ceil_div(rows, int64_t{kWarpsOfBlock}), kThreads}, heads, rows, x.device_data<T>(),
             q_weight.device_data<T>(), k_weight.device_data<T>(), y.device_data<T>(), k.rstd.device_data<float>(),
             static_cast<float>(k.eps));
      copy_back(*this, y, k.y);
    });
    if (by_packs) return;
    normalize_heads(0, heads.queries, k.q_weight);
    normalize_heads(heads.queries, heads.normed - heads.queries, k.k_weight);
    const int64_t values = heads.normed * head_dim;
    copy_columns(k.x, values, k.y, values, rows, heads.row - values);
  });
}

void CudaBackend::execute(const QkNormBackward& k) {
  const Heads heads(k.layout);
  const int64_t rows = k.x.dim(0), head_dim = heads.head_dim;
  const auto differentiate_heads = [&](int64_t first, int64_t count, const Tensor& weight, const Tensor& dweight) {
    const int64_t begin = first * head_dim, cols = count * head_dim;
    const Tensor x = empty(*this, k.x.dtype(), {rows * count, head_dim}), dy = empty_like(x), dx = empty_like(x),
                 rstd = empty(*this, k.rstd.dtype(), {rows * count});
    copy_columns(k.x, begin, x, 0, rows, cols);
    copy_columns(k.dy, begin, dy, 0, rows, cols);
    copy_columns(k.rstd, first, rstd, 0, rows, count);
    execute(RmsNormBackward{.x = x, .weight = weight, .rstd = rstd, .dy = dy, .dx = dx, .dweight = dweight, .accumulate = k.accumulate});
    copy_columns(dx, 0, k.dx, begin, rows, cols);
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
    differentiate_heads(0, heads.queries, k.q_weight, k.dq_weight);
    differentiate_heads(heads.queries, heads.normed - heads.queries, k.k_weight, k.dk_weight);
    const int64_t values = heads.normed * head_dim;
    copy_columns(k.dy, values, k.dx, values, rows, heads.row - values);
  });
}

}  // namespace mantissa
