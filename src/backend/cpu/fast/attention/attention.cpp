// Attention in blocks (FlashAttention-2, Dao 2023): one piece of work is a block of queries of one head, which runs over its blocks of keys
// with an online softmax. bf16 is widened on the way into scratch.
#include <algorithm>
#include <cmath>

#include "backend/cpu/fast/attention/attention_tiles.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "base/parallel.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/integers.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {
namespace {

using tiles::kTile, tiles::kLargestHead, tiles::kNoScore;

// Locates the heads of packed q|k|v rows, and the keys that the queries of a block see.

// One sequence: `length` rows of heads * head_dim channels each, packed as in HeadLayout or only the query heads.
template <class T>
struct HeadRows {
  T* first;
  int64_t stride, length, head_dim;
  // Rows [tile * kTile, ...) of the head in column head * head_dim.
  tiles::Rows<T> tile(int64_t head, int64_t index) const {
    return {first + head * head_dim + index * kTile * stride, stride, std::min(kTile, length - index * kTile), head_dim};
  }
};

// Returns sequence b of `rows` [batch * length, stride].
template <class T>
HeadRows<T> sequence(const Tensor& rows, int64_t b, int64_t batch, int64_t head_dim) {
  const int64_t length = rows.dim(0) / batch, stride = rows.dim(1);
  return {rows.device_data<std::remove_const_t<T>>() + b * length * stride, stride, length, head_dim};
}

// Returns where the last `window` keys up to a position begin; 0: all keys count.
int64_t window_start(int64_t position, int64_t window) { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }

// Finds the first key of each query of one sequence.
class FirstKeys {
 public:
  FirstKeys(const Tensor& segment_starts, int64_t b, int64_t length, int64_t window)
      : starts_(segment_starts.defined() ? segment_starts.device_data<int32_t>() + b * length : nullptr),
        length_(length),
        window_(window) {}

  // Returns the first key block that a query of the block sees. Starts need not rise from row to row.
  int64_t first_tile(int64_t query_tile) const {
    const int64_t begin = query_tile * kTile, in_window = window_start(begin, window_);
    if (starts_ == nullptr) return in_window / kTile;
    const int64_t start = *std::min_element(starts_ + begin, starts_ + std::min(length_, begin + kTile));
    return std::max(start, in_window) / kTile;
  }

  tiles::Mask mask(int64_t query_tile, int64_t key_tile) const {
    tiles::Mask mask;
    mask.diagonal = query_tile == key_tile;
    mask.partial = mask.diagonal;
    for (int64_t i = 0; i < kTile; ++i) {
      const int64_t row = query_tile * kTile + i;
      const int64_t first = row >= length_ ? 0 : std::max<int64_t>(0, first_key(row) - key_tile * kTile);
      mask.partial = mask.partial || first > 0;
      mask.first[i] = static_cast<int32_t>(first);
      mask.last[i] = static_cast<int32_t>(mask.diagonal ? i : kTile - 1);
    }
    return mask;
  }

 private:
  int64_t first_key(int64_t row) const {
    const int64_t in_window = window_start(row, window_);
    return starts_ == nullptr ? in_window : std::max<int64_t>(starts_[row], in_window);
  }

  const int32_t* starts_;
  int64_t length_, window_;
};

// The two GEMMs that forward and backward pass of blocked attention share, with scores transposed as in attention_tiles.h.

// Holds the operands of one GEMM of a block of `keys` keys with a block of `queries` queries; ld is the width of a row of either.
struct BlockGemm {
  const float *a, *b;
  float* out;
  int64_t keys, queries, ld;
};

// out [keys, queries] = a [keys, ld] * b [ld, queries], b as tiles::transpose() leaves it
void score_gemm(const BlockGemm& p, const tiles::Mask& mask) {
  tiles::gemm({.a = p.a,
               .lda = p.ld,
               .a_transposed = false,
               .b = p.b,
               .ldb = kTile,
               .out = p.out,
               .ldo = kTile,
               .rows = round_up(p.keys, 8),
               .cols = round_up(p.queries, 16),
               .depth = p.ld,
               .accumulate = false,
               .triangle = mask.diagonal ? tiles::Triangle::out_upper : tiles::Triangle::none});
}

// out [queries, ld] (+)= transpose of a [keys, queries] * b [keys, ld]
void query_gemm(const BlockGemm& p, const tiles::Mask& mask, bool accumulate) {
  tiles::gemm({.a = p.a,
               .lda = kTile,
               .a_transposed = true,
               .b = p.b,
               .ldb = p.ld,
               .out = p.out,
               .ldo = p.ld,
               .rows = round_up(p.queries, 8),
               .cols = p.ld,
               .depth = p.keys,
               .accumulate = accumulate,
               .triangle = mask.diagonal ? tiles::Triangle::a_lower : tiles::Triangle::none});
}

// Online softmax attention of one block of queries, fed with blocks of keys one after the other. bf16 is widened on the way into scratch.

// State of a softmax before the first key: empty, or the sink of its head.
struct SoftmaxStart {
  float maximum = kNoScore, sum = 0.0F;
};

SoftmaxStart softmax_start(const Tensor& sinks, int64_t head) {
  if (!sinks.defined()) return {};
  const bool wide = sinks.dtype() == Dtype::f32;
  return {.maximum = wide ? sinks.device_data<float>()[head] : to_float(sinks.device_data<bf16>()[head]), .sum = 1.0F};
}

// One block of queries and its running output. Lives on the stack of the thread: a few hundred KB, of which head_dim decides how much is
// touched.
class QueryBlock {
 public:
  template <class T>
  QueryBlock(tiles::Rows<const T> queries, float scale, SoftmaxStart start) : rows_(queries.rows), ld_(round_up(queries.head_dim, 16)) {
    cloned<tiles::widen<T>>(queries, scale, keys_, ld_);
    cloned<tiles::transpose>(keys_, round_up(rows_, 8), ld_, queries_);
    std::fill_n(softmax_.maximum, kTile, start.maximum);
    std::fill_n(softmax_.sum, kTile, start.sum);
  }

  template <class T>
  void attend(tiles::Rows<const T> keys, tiles::Rows<const T> values, const tiles::Mask& mask) {
    cloned<tiles::widen<T>>(keys, 1.0F, keys_, ld_);
    cloned<tiles::widen<T>>(values, 1.0F, values_, ld_);
    const int64_t rows = round_up(rows_, 8);
    score_gemm({.a = keys_, .b = queries_, .out = scores_, .keys = keys.rows, .queries = rows_, .ld = ld_}, mask);
    cloned<tiles::softmax>(scores_, keys.rows, rows, mask, softmax_);
    if (!empty_) cloned<tiles::scale>(out_, rows, ld_, softmax_.rescale);
    query_gemm({.a = scores_, .b = values_, .out = out_, .keys = keys.rows, .queries = rows_, .ld = ld_}, mask, !empty_);
    empty_ = false;
  }

  template <class T>
  void finish(tiles::Rows<T> out, float* lse) {
    float inverse[kTile];
    for (int64_t i = 0; i < rows_; ++i) {
      inverse[i] = 1.0F / softmax_.sum[i];
      lse[i] = softmax_.maximum[i] + std::log(softmax_.sum[i]);
    }
    cloned<tiles::narrow<T>>(out_, ld_, inverse, out);
  }

 private:
  alignas(64) float queries_[kTile * kLargestHead];  // transposed and scaled
  alignas(64) float keys_[kTile * kLargestHead];
  alignas(64) float values_[kTile * kLargestHead];
  alignas(64) float out_[kTile * kLargestHead];
  alignas(64) float scores_[kTile * kTile];  // transposed
  tiles::Softmax softmax_;
  int64_t rows_, ld_;
  bool empty_ = true;
};

}  // namespace

void CpuBackend::execute(const AttentionForward& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  const int64_t length = k.qkv.dim(0) / k.batch, blocks = ceil_div(length, kTile), heads = k.layout.heads, d = k.layout.head_dim;
  check_segment_starts("attention", k.segment_starts, length);
  with_narrow_values(k.qkv.dtype(), [&]<class T>() {
    parallel_for(k.batch * heads * blocks, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        // The longest rows of key blocks come first, so that what is left at the end is short.
        const int64_t tile = blocks - 1 - item % blocks, bh = item / blocks, b = bh / heads, h = bh % heads;
        const int64_t key = heads + h / (heads / k.layout.kv_heads), value = key + k.layout.kv_heads;
        const HeadRows<const T> qkv = sequence<const T>(k.qkv, b, k.batch, d);
        const FirstKeys first_keys(k.segment_starts, b, length, k.window);
        QueryBlock block(qkv.tile(h, tile), static_cast<float>(k.scale), softmax_start(k.sinks, h));
        for (int64_t j = first_keys.first_tile(tile); j <= tile; ++j) {
          block.attend(qkv.tile(key, j), qkv.tile(value, j), first_keys.mask(tile, j));
        }
        block.finish(sequence<T>(k.out, b, k.batch, d).tile(h, tile), k.lse.device_data<float>() + bh * length + tile * kTile);
      }
    });
  });
}

namespace {

// Attention of generation. A prompt runs in blocks, as in training; the few rows of a step run row by row, each over its keys in chunks.

using simd::Floats;
using simd::kLanes;

constexpr int64_t kLeastBlockRows = 16;  // fewer rows leave most of a block empty

// The softmax of one query over the keys so far.
struct RowState {
  alignas(32) float query[kLargestHead];  // scaled
  alignas(32) float out[kLargestHead];
  float maximum, sum;
};

template <class T>
[[gnu::always_inline]] inline void start(const T* query, int64_t d, float scale, SoftmaxStart softmax, RowState& state) {
  state.maximum = softmax.maximum, state.sum = softmax.sum;
  for (int64_t j = 0; j < d; j += kLanes) simd::store(state.out + j, Floats{});
  simd::for_lanes(
      d, [&](int64_t j, auto part) __attribute__((always_inline)) { simd::store(state.query + j, simd::load(query + j, part) * scale); });
}

template <class T>
[[gnu::always_inline]] inline float score(const float* query, const T* key, int64_t d) {
  simd::Slots sums;
  simd::for_slots(
      d, [&](int64_t j, int slot, auto part) __attribute__((always_inline)) {
        sums.slot[slot] = simd::fma(simd::load(query + j), simd::load(key + j, part), sums.slot[slot]);
      });
  return simd::sum(sums);
}

// Attends to up to kTile keys.
template <class T>
[[gnu::always_inline]] inline void attend(tiles::Rows<const T> keys, const T* values, RowState& state) {
  alignas(32) float p[kTile];
  float maximum = state.maximum;
  for (int64_t i = 0; i < keys.rows; ++i) {
    p[i] = score(state.query, keys.first + i * keys.stride, keys.head_dim);
    maximum = p[i] > maximum ? p[i] : maximum;
  }
  std::fill(p + keys.rows, p + round_up(keys.rows, kLanes), kNoScore);
  const float rescale = simd::exp(simd::broadcast(state.maximum - maximum))[0];
  Floats sum = {};
  for (int64_t i = 0; i < keys.rows; i += kLanes) {
    const Floats e = simd::exp(simd::load(p + i) - maximum);
    simd::store(p + i, e);
    sum += e;
  }
  state.sum = state.sum * rescale + simd::sum(sum);
  state.maximum = maximum;
  simd::for_lanes(
      keys.head_dim, [&](int64_t j, auto part) __attribute__((always_inline)) {
        Floats out = simd::load(state.out + j) * rescale;
        for (int64_t i = 0; i < keys.rows; ++i) out = simd::fma(simd::broadcast(p[i]), simd::load(values + i * keys.stride + j, part), out);
        simd::store(state.out + j, out);
      });
}

// out [head_dim] = attention of one query over all rows of keys, and of values with the same stride.
template <class T>
[[gnu::always_inline]] inline void attend_row(const T* query, tiles::Rows<const T> keys, const T* values, float scale, SoftmaxStart softmax,
                                              T* out) {
  RowState state;
  start(query, keys.head_dim, scale, softmax, state);
  for (int64_t first = 0; first < keys.rows; first += kTile) {
    const int64_t at = first * keys.stride;
    attend({keys.first + at, keys.stride, std::min(kTile, keys.rows - first), keys.head_dim}, values + at, state);
  }
  simd::for_lanes(
      keys.head_dim, [&](int64_t j, auto part)
                         __attribute__((always_inline)) { simd::store(out + j, simd::load(state.out + j) / state.sum, part); });
}

// The mask for queries at positions `first` and up, and keys from position key_tile * kTile.
tiles::Mask mask(int64_t first, int64_t key_tile, int64_t window) {
  const int64_t ahead = first - key_tile * kTile;
  tiles::Mask mask;
  mask.diagonal = ahead == 0;
  mask.partial = ahead < kTile - 1 || window_start(first + kTile - 1, window) > key_tile * kTile;
  for (int64_t i = 0; i < kTile; ++i) {
    mask.first[i] = static_cast<int32_t>(std::max<int64_t>(0, window_start(first + i, window) - key_tile * kTile));
    mask.last[i] = static_cast<int32_t>(std::min(kTile - 1, ahead + i));
  }
  return mask;
}

}  // namespace

void CpuBackend::execute(const CachedAttention& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  const int64_t rows = k.qkv.dim(0), d = k.layout.head_dim, heads = k.layout.heads, group = heads / k.layout.kv_heads;
  const float scale = static_cast<float>(k.scale);
  with_narrow_values(k.qkv.dtype(), [&]<class T>() {
    const HeadRows<const T> qkv = sequence<const T>(k.qkv, 0, 1, d);
    const HeadRows<T> out = sequence<T>(k.out, 0, 1, d);
    HeadRows<const T> keys = sequence<const T>(k.keys, 0, 1, d), values = sequence<const T>(k.values, 0, 1, d);
    keys.length = values.length = k.first + rows;
    const int64_t channels = keys.stride;
    for (int64_t i = 0; i < rows; ++i) {
      const T* key = qkv.first + i * qkv.stride + heads * d;
      std::copy_n(key, channels, k.keys.device_data<T>() + (k.first + i) * channels);
      std::copy_n(key + channels, channels, k.values.device_data<T>() + (k.first + i) * channels);
    }
    if (rows < kLeastBlockRows) {
      return parallel_for(heads * rows, rows_per_piece(keys.length * d), Subnormals::flushed, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          const int64_t h = item / rows, i = item % rows, last = k.first + i, first = window_start(last, k.window);
          const int64_t at = first * channels + h / group * d;
          cloned<attend_row<T>>(qkv.first + i * qkv.stride + h * d, {keys.first + at, channels, last + 1 - first, d}, values.first + at,
                                scale, softmax_start(k.sinks, h), out.first + i * out.stride + h * d);
        }
      });
    }
    const int64_t blocks = ceil_div(rows, kTile);
    parallel_for(heads * blocks, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t h = item / blocks, tile = blocks - 1 - item % blocks, first = k.first + tile * kTile;
        const tiles::Rows<const T> queries = qkv.tile(h, tile);
        QueryBlock block(queries, scale, softmax_start(k.sinks, h));
        for (int64_t j = window_start(first, k.window) / kTile; j <= (first + queries.rows - 1) / kTile; ++j) {
          block.attend(keys.tile(h / group, j), values.tile(h / group, j), mask(first, j, k.window));
        }
        float lse[kTile];
        block.finish(out.tile(h, tile), lse);
      }
    });
  });
}

namespace {

// Gradients of attention in one pass over the blocks. With p = exp(scale q k - lse) and delta = dout out: ds = p (dout v - delta),
// dq = scale sum ds k, dk = scale sum ds q, dv = sum p dout. A piece of work owns a key head and every n-th block of its queries, and sums
// dk and dv in memory of its own, over its blocks in order; a second pass adds the n sums in order. n depends on the shape only.

// Few key heads are cut into parts, so that they occupy more cores; every part costs memory and adding, so it has some blocks of queries to
// do.
constexpr int64_t kWantedPieces = 8, kLeastBlocks = 4;

// Gradients of one block of keys, fp32 [kTile, head_dim rounded up to 16].
struct KeyGradients {
  float *dkey, *dvalue;
};

// One block of queries and the gradient of it. Lives on the stack of the thread, as in the forward pass.
class QueryBlockBackward {
 public:
  template <class T>
  QueryBlockBackward(tiles::Rows<const T> queries, tiles::Rows<const T> out, tiles::Rows<const T> dout, const float* lse, float scale)
      : rows_(queries.rows), ld_(round_up(queries.head_dim, 16)), scale_(scale) {
    const int64_t padded = round_up(rows_, 8);
    cloned<tiles::widen<T>>(queries, scale, queries_, ld_);
    cloned<tiles::widen<T>>(dout, 1.0F, douts_, ld_);
    cloned<tiles::widen<T>>(out, 1.0F, keys_, ld_);
    cloned<tiles::dot>(douts_, keys_, padded, ld_, statistics_.delta);
    std::fill(std::copy_n(lse, rows_, statistics_.lse), statistics_.lse + padded, 0.0F);
    cloned<tiles::transpose>(queries_, padded, ld_, queries_transposed_);
    cloned<tiles::transpose>(douts_, padded, ld_, douts_transposed_);
  }

  template <class T>
  void attend(tiles::Rows<const T> keys, tiles::Rows<const T> values, const tiles::Mask& mask, KeyGradients gradients) {
    cloned<tiles::widen<T>>(keys, 1.0F, keys_, ld_);
    cloned<tiles::widen<T>>(values, 1.0F, values_, ld_);
    const auto gemm = [&](const float* a, const float* b, float* out) {
      return BlockGemm{.a = a, .b = b, .out = out, .keys = keys.rows, .queries = rows_, .ld = ld_};
    };
    score_gemm(gemm(keys_, queries_transposed_, p_), mask);
    score_gemm(gemm(values_, douts_transposed_, ds_), mask);
    cloned<tiles::gradient>(p_, ds_, round_up(keys.rows, 8), round_up(rows_, 8), mask, statistics_);
    key_gradient(p_, douts_, gradients.dvalue, keys.rows, mask);
    key_gradient(ds_, queries_, gradients.dkey, keys.rows, mask);
    query_gemm(gemm(ds_, keys_, dqueries_), mask, !empty_);
    empty_ = false;
  }

  template <class T>
  void finish(tiles::Rows<T> dqueries) {
    float factor[kTile];
    std::fill_n(factor, kTile, scale_);
    cloned<tiles::narrow<T>>(dqueries_, ld_, factor, dqueries);
  }

 private:
  // out [keys, ld] += a [keys, queries] * b [queries, ld]
  void key_gradient(const float* a, const float* b, float* out, int64_t keys, const tiles::Mask& mask) const {
    tiles::gemm({.a = a,
                 .lda = kTile,
                 .a_transposed = false,
                 .b = b,
                 .ldb = ld_,
                 .out = out,
                 .ldo = ld_,
                 .rows = round_up(keys, 8),
                 .cols = ld_,
                 .depth = rows_,
                 .accumulate = true,
                 .triangle = mask.diagonal ? tiles::Triangle::a_upper : tiles::Triangle::none});
  }

  alignas(64) float queries_[kTile * kLargestHead];  // scaled
  alignas(64) float queries_transposed_[kTile * kLargestHead];
  alignas(64) float douts_[kTile * kLargestHead];
  alignas(64) float douts_transposed_[kTile * kLargestHead];
  alignas(64) float keys_[kTile * kLargestHead];
  alignas(64) float values_[kTile * kLargestHead];
  alignas(64) float dqueries_[kTile * kLargestHead];
  alignas(64) float p_[kTile * kTile];   // transposed
  alignas(64) float ds_[kTile * kTile];  // transposed
  tiles::Statistics statistics_;
  int64_t rows_, ld_;
  float scale_;
  bool empty_ = true;
};

}  // namespace

void CpuBackend::execute(const AttentionBackward& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  const int64_t length = k.qkv.dim(0) / k.batch, blocks = ceil_div(length, kTile), d = k.layout.head_dim, ld = round_up(d, 16);
  check_segment_starts("attention backward", k.segment_starts, length);
  const int64_t heads = k.layout.heads, kv_heads = k.layout.kv_heads, group = heads / kv_heads, key_heads = k.batch * kv_heads;
  const int64_t parts = std::max<int64_t>(1, std::min(kWantedPieces / key_heads, blocks * group / kLeastBlocks));
  const int64_t size = blocks * kTile * ld;  // elements in the gradients of one head
  const auto memory = k.qkv.device().allocate(key_heads * parts * 2 * size * int64_t{sizeof(float)});
  float* all_sums = reinterpret_cast<float*>(memory.get());  // [key_heads, parts, dk and dv, blocks * kTile, ld]
  const auto sums = [&](int64_t key_head, int64_t part, int64_t tile) {
    float* dkey = all_sums + (key_head * parts + part) * 2 * size + tile * kTile * ld;
    return KeyGradients{dkey, dkey + size};
  };
  with_narrow_values(k.qkv.dtype(), [&]<class T>() {
    // Each item goes over blocks part, part + parts, ... of the queries that read its key head.
    parallel_for(key_heads * parts, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t key_head = item / parts, part = item % parts, b = key_head / kv_heads, kv = key_head % kv_heads;
        std::fill_n(sums(key_head, part, 0).dkey, 2 * size, 0.0F);
        const HeadRows<const T> qkv = sequence<const T>(k.qkv, b, k.batch, d);
        const FirstKeys first_keys(k.segment_starts, b, length, k.window);
        const int64_t key = heads + kv, value = key + kv_heads;
        for (int64_t i = part; i < group * blocks; i += parts) {
          const int64_t h = kv * group + i / blocks, tile = i % blocks;
          QueryBlockBackward block(qkv.tile(h, tile), sequence<const T>(k.out, b, k.batch, d).tile(h, tile),
                                   sequence<const T>(k.dout, b, k.batch, d).tile(h, tile),
                                   k.lse.device_data<float>() + (b * heads + h) * length + tile * kTile, static_cast<float>(k.scale));
          for (int64_t j = first_keys.first_tile(tile); j <= tile; ++j) {
            block.attend(qkv.tile(key, j), qkv.tile(value, j), first_keys.mask(tile, j), sums(key_head, part, j));
          }
          block.finish(sequence<T>(k.dqkv, b, k.batch, d).tile(h, tile));
        }
      }
    });
    parallel_for(key_heads * blocks, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t key_head = item / blocks, tile = item % blocks, key = heads + key_head % kv_heads;
        const KeyGradients total = sums(key_head, 0, tile);
        for (int64_t part = 1; part < parts; ++part) {
          const KeyGradients more = sums(key_head, part, tile);
          cloned<tiles::add>(total.dkey, more.dkey, kTile * ld);
          cloned<tiles::add>(total.dvalue, more.dvalue, kTile * ld);
        }
        const HeadRows<T> dqkv = sequence<T>(k.dqkv, key_head / kv_heads, k.batch, d);
        float factor[kTile];
        std::fill_n(factor, kTile, 1.0F);
        cloned<tiles::narrow<T>>(total.dkey, ld, factor, dqkv.tile(key, tile));
        cloned<tiles::narrow<T>>(total.dvalue, ld, factor, dqkv.tile(key + kv_heads, tile));
      }
    });
  });
}

}  // namespace mantissa
