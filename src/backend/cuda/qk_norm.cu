#include "backend/cuda/column_sums.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "mantissa/backend/functions.h"

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

// Of the gradient of a weight, for the channels of all heads that it scales.
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

struct PartialTerm {
  const float* partials;
  int64_t columns;

  __device__ Pack operator()(int64_t row, int64_t first) const {
    return Packs<const float>{partials + row * columns, columns, columns % kPack == 0}.read(first);
  }
};

}  // namespace

void CudaBackend::execute(const QkNormForward& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(qk_norm<T>, {k.x.dim(0), kThreads}, Heads(k.layout), k.x.device_data<T>(), k.q_weight.device_data<T>(),
           k.k_weight.device_data<T>(), k.y.device_data<T>(), k.rstd.device_data<float>(), static_cast<float>(k.eps));
  });
}

void CudaBackend::execute(const QkNormBackward& k) {
  const Heads heads(k.layout);
  const int64_t rows = k.x.dim(0), head_dim = heads.head_dim;
  // Sums over the rows of a piece; then, with a row for each head of each piece, over rows again.
  const auto sum_heads = [&]<class T>(int64_t first_head, int64_t count, const Tensor& out) {
    const int64_t columns = count * head_dim, pieces = ceil_div(rows, kRowsOfPiece), pieces_again = ceil_div(pieces * count, kRowsOfPiece);
    const Tensor partials = empty(*this, Dtype::f32, {pieces * columns}), again = empty(*this, Dtype::f32, {pieces_again * head_dim});
    const T *const x = k.x.device_data<T>(), *const dy = k.dy.device_data<T>();
    const bool aligned = begin_at_packs(heads.row, x, dy) && first_head * head_dim % kPack == 0;
    const HeadsWeightTerm<T> term{heads, x, dy, k.rstd.device_data<float>(), first_head, columns, aligned};
    launch(sum_pieces<HeadsWeightTerm<T>>, grid_of_pieces(rows, columns), term, rows, columns, partials.device_data<float>());
    launch(sum_pieces<PartialTerm>, grid_of_pieces(pieces * count, head_dim), PartialTerm{partials.device_data<float>(), head_dim},
           pieces * count, head_dim, again.device_data<float>());
    launch(add_pieces<float>, grid_of_columns(head_dim), again.device_data<float>(), pieces_again, head_dim, out.device_data<float>(),
           k.accumulate);
  };
  with_values(k.x.dtype(), [&]<class T>() {
    launch(qk_norm_dx<T>, {rows, kThreads}, heads, k.x.device_data<T>(), k.q_weight.device_data<T>(), k.k_weight.device_data<T>(),
           k.rstd.device_data<float>(), k.dy.device_data<T>(), k.dx.device_data<T>());
    sum_heads.template operator()<T>(0, heads.queries, k.dq_weight);
    sum_heads.template operator()<T>(heads.queries, heads.normed - heads.queries, k.dk_weight);
  });
}

}  // namespace mantissa
