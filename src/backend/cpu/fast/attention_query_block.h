// Online softmax attention of one block of queries, fed with blocks of keys one after the other. bf16 is widened on the way into scratch.
#pragma once

#include <algorithm>
#include <cmath>

#include "backend/cpu/fast/attention_gemms.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

// State of a softmax before the first key: empty, or the sink of its head.
struct SoftmaxStart {
  float maximum = kNoScore, sum = 0.0F;
};

inline SoftmaxStart softmax_start(const Tensor& sinks, int64_t head) {
  if (!sinks.defined()) return {};
  const bool wide = sinks.dtype() == Dtype::f32;
  return {.maximum = wide ? sinks.device_data<float>()[head] : to_float(sinks.device_data<bf16>()[head]), .sum = 1.0F};
}

// One block of queries and its running output. Lives on the stack of the thread: a few hundred KB, of which head_dim decides how much is
// touched.
class QueryBlock {
 public:
  template <class T>
  QueryBlock(TileRows<const T> queries, float scale, SoftmaxStart start) : rows_(queries.rows), ld_(round_up(queries.head_dim, 16)) {
    widen_tile(queries, scale, keys_, ld_);
    transpose_tile(keys_, round_up(rows_, 8), ld_, queries_);
    std::fill_n(softmax_.maximum, kTile, start.maximum);
    std::fill_n(softmax_.sum, kTile, start.sum);
  }

  template <class T>
  void attend(TileRows<const T> keys, TileRows<const T> values, const TileMask& mask) {
    widen_tile(keys, 1.0F, keys_, ld_);
    widen_tile(values, 1.0F, values_, ld_);
    const int64_t rows = round_up(rows_, 8);
    score_gemm({.a = keys_, .b = queries_, .out = scores_, .keys = keys.rows, .queries = rows_, .ld = ld_}, mask);
    softmax_tile(scores_, keys.rows, rows, mask, softmax_);
    if (!empty_) scale_rows(out_, rows, ld_, softmax_.rescale);
    query_gemm({.a = scores_, .b = values_, .out = out_, .keys = keys.rows, .queries = rows_, .ld = ld_}, mask, !empty_);
    empty_ = false;
  }

  template <class T>
  void finish(TileRows<T> out, float* lse) {
    float inverse[kTile];
    for (int64_t i = 0; i < rows_; ++i) {
      inverse[i] = 1.0F / softmax_.sum[i];
      lse[i] = softmax_.maximum[i] + std::log(softmax_.sum[i]);
    }
    store_tile(out_, ld_, inverse, out);
  }

 private:
  alignas(64) float queries_[kTile * kLargestHead];  // transposed and scaled
  alignas(64) float keys_[kTile * kLargestHead];
  alignas(64) float values_[kTile * kLargestHead];
  alignas(64) float out_[kTile * kLargestHead];
  alignas(64) float scores_[kTile * kTile];  // transposed
  SoftmaxTile softmax_;
  int64_t rows_, ld_;
  bool empty_ = true;
};

}  // namespace mantissa
