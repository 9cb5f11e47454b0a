// Operands of the attention kernels, and the launches of those on tensor cores.
#pragma once

#include <array>

#include "backend/cuda/gemm/aligned.h"
#include "backend/cuda/gemm/tile_product.h"
#include "gpu/runtime.h"

namespace mantissa::gpu {

inline constexpr float kNoScore = -INFINITY;  // exp gives 0

// Rows of one head, `stride` elements apart.
template <class T>
struct HeadRows {
  T* first;
  int64_t stride;
};

// The keys that the queries of one sequence see: the query at a position sees [first(position), position].
struct Mask {
  const int32_t* segment_starts;  // one for each position of the sequence; null: none
  int64_t window;                 // 0: none

  // Returns the first key that is seen; never a negative one, whatever the starts are.
  __device__ int64_t first(int64_t position) const {
    const int64_t start = segment_starts ? segment_starts[position] : 0, oldest = window > 0 ? position - window + 1 : 0;
    const int64_t first = start > oldest ? start : oldest;
    return first > 0 ? first : 0;
  }
};

// Queries, and the keys and values of their sequence or of a cache. Query i has the position of key i + ahead.
template <class T>
struct Attention {
  const T *queries, *keys, *values, *sinks;
  int64_t query_stride, key_stride;  // elements from one row to the next
  int64_t queries_of_sequence, keys_of_sequence, ahead;
  int64_t heads, group, head_dim;
  const int32_t* segment_starts;
  int64_t window;
  float scale;
  T* out;
  float* lse;  // null: not wanted
};

// Operands of the backward pass, over rows that lie like those of the forward pass.
template <class T>
struct AttentionGradient {
  const T *qkv, *dout;
  const float *lse, *deltas;  // [B, H, T]
  const int32_t* segment_starts;
  int64_t window, length, heads, kv_heads, group, head_dim;
  float scale;
  T* dqkv;

  __device__ int64_t row() const { return (heads + 2 * kv_heads) * head_dim; }
  // Returns a head of packed rows: heads of the queries come first, then those of the keys, then those of the values.
  template <class P>
  __device__ HeadRows<P> packed(P* rows, int64_t sequence, int64_t head) const {
    return {rows + sequence * length * row() + head * head_dim, row()};
  }
  __device__ HeadRows<const T> output(int64_t sequence, int64_t head) const {
    return {dout + (sequence * length * heads + head) * head_dim, heads * head_dim};
  }
  __device__ Mask mask(int64_t sequence) const { return {segment_starts ? segment_starts + sequence * length : nullptr, window}; }
  __device__ Range part(int64_t first, int64_t rows) const { return {first, first + rows < length ? first + rows : length}; }
};

// Attention on tensor cores takes bf16 values in heads of 64 or 128 channels. Scores and sums are fp32, as tensor cores add; weights and
// their gradients are rounded to bf16 before they are multiplied.
inline bool takes_flash(Dtype dtype, int64_t head_dim, double scale) {
  return dtype == Dtype::bf16 && (head_dim == 64 || head_dim == 128) && scale > 0.0;  // the largest product is the largest score
}

// Return the kernels of so many sequences: that of the forward pass, and those that give dq, and dk and dv. They need operands that
// takes_flash() takes and that are aligned().
KernelLaunch<Attention<bf16>> flash_forward(const Attention<bf16>& k, int64_t sequences);
std::array<KernelLaunch<AttentionGradient<bf16>>, 2> flash_backward(const AttentionGradient<bf16>& k, int64_t sequences);

}  // namespace mantissa::gpu
