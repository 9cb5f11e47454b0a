// Attention in blocks (FlashAttention-2, Dao 2023): one piece of work is a block of queries of one head, which runs over its blocks of keys
// with an online softmax. bf16 is widened on the way into scratch.
#include <algorithm>
#include <cmath>

#include "backend/cpu/fast/attention/attention_tiles.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/pieces.h"
#include "base/parallel.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/integers.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {
namespace {

// Locates the heads of packed q|k|v rows, and the keys that the queries of a block see.

// One sequence: `length` rows of heads * head_dim channels each, packed as in HeadLayout or only the query heads.
template <class T>
struct HeadRows {
  T* first;
  int64_t stride, length, head_dim;
  // Rows [tile * kTile, ...) of the head in column head * head_dim.
  TileRows<T> tile(int64_t head, int64_t index) const {
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

  TileMask mask(int64_t query_tile, int64_t key_tile) const {
    TileMask mask;
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

// out [keys, queries] = a [keys, ld] * b [ld, queries], b as transpose_tile() leaves it
void score_gemm(const BlockGemm& p, const TileMask& mask) {
  tile_gemm({.a = p.a,
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
             .triangle = mask.diagonal ? Triangle::out_upper : Triangle::none});
}

// out [queries, ld] (+)= transpose of a [keys, queries] * b [keys, ld]
void query_gemm(const BlockGemm& p, const TileMask& mask, bool accumulate) {
  tile_gemm({.a = p.a,
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
             .triangle = mask.diagonal ? Triangle::a_lower : Triangle::none});
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

template <class T>
void forward(const AttentionForward& k) {
  const int64_t length = k.qkv.dim(0) / k.batch, tiles = ceil_div(length, kTile), heads = k.layout.heads, d = k.layout.head_dim;
  parallel_for(k.batch * heads * tiles, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      // The longest rows of key blocks come first, so that what is left at the end is short.
      const int64_t tile = tiles - 1 - item % tiles, bh = item / tiles, b = bh / heads, h = bh % heads;
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
}

}  // namespace

void CpuBackend::execute(const AttentionForward& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  check_segment_starts("attention", k.segment_starts, k.qkv.dim(0) / k.batch);
  k.qkv.dtype() == Dtype::bf16 ? forward<bf16>(k) : forward<float>(k);
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
[[gnu::always_inline]] inline void attend(TileRows<const T> keys, const T* values, RowState& state) {
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
[[gnu::always_inline]] inline void attend_row(const T* query, TileRows<const T> keys, const T* values, float scale, SoftmaxStart softmax,
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
TileMask mask(int64_t first, int64_t key_tile, int64_t window) {
  const int64_t ahead = first - key_tile * kTile;
  TileMask mask;
  mask.diagonal = ahead == 0;
  mask.partial = ahead < kTile - 1 || window_start(first + kTile - 1, window) > key_tile * kTile;
  for (int64_t i = 0; i < kTile; ++i) {
    mask.first[i] = static_cast<int32_t>(std::max<int64_t>(0, window_start(first + i, window) - key_tile * kTile));
    mask.last[i] = static_cast<int32_t>(std::min(kTile - 1, ahead + i));
  }
  return mask;
}

template <class T>
class Cached {
 public:
  explicit Cached(const CachedAttention& k)
      : k_(k),
        rows_(k.qkv.dim(0)),
        d_(k.layout.head_dim),
        qkv_(sequence<const T>(k.qkv, 0, 1, d_)),
        out_(sequence<T>(k.out, 0, 1, d_)),
        keys_(up_to_last(k.keys)),
        values_(up_to_last(k.values)) {}

  void run() {
    store_keys_and_values();
    if (rows_ >= kLeastBlockRows) {
      const int64_t tiles = ceil_div(rows_, kTile);
      for_pieces(k_.layout.heads * tiles, 1, [&](int64_t i) { block(i / tiles, tiles - 1 - i % tiles); });
    } else {
      for_pieces(k_.layout.heads * rows_, rows_per_piece(keys_.length * d_), [&](int64_t i) { row(i / rows_, i % rows_); });
    }
  }

 private:
  template <class Body>
  static void for_pieces(int64_t count, int64_t chunk, const Body& body) {
    parallel_for(count, chunk, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

  HeadRows<T> up_to_last(const Tensor& cache) const {
    HeadRows<T> rows = sequence<T>(cache, 0, 1, d_);
    rows.length = k_.first + rows_;
    return rows;
  }

  int64_t key_head(int64_t h) const { return h / (k_.layout.heads / k_.layout.kv_heads); }

  void store_keys_and_values() const {
    const int64_t channels = keys_.stride;
    for (int64_t i = 0; i < rows_; ++i) {
      const T* key = qkv_.first + i * qkv_.stride + k_.layout.heads * d_;
      std::copy_n(key, channels, keys_.first + (k_.first + i) * channels);
      std::copy_n(key + channels, channels, values_.first + (k_.first + i) * channels);
    }
  }

  void row(int64_t h, int64_t i) const {
    const int64_t end = k_.first + i + 1, begin = window_start(end - 1, k_.window), at = begin * keys_.stride + key_head(h) * d_;
    cloned<attend_row<T>>(qkv_.first + i * qkv_.stride + h * d_, {keys_.first + at, keys_.stride, end - begin, d_}, values_.first + at,
                          static_cast<float>(k_.scale), softmax_start(k_.sinks, h), out_.first + i * out_.stride + h * d_);
  }

  void block(int64_t h, int64_t tile) const {
    const TileRows<const T> queries = qkv_.tile(h, tile);
    const int64_t first = k_.first + tile * kTile, last_tile = (first + queries.rows - 1) / kTile;
    QueryBlock block(queries, static_cast<float>(k_.scale), softmax_start(k_.sinks, h));
    for (int64_t j = window_start(first, k_.window) / kTile; j <= last_tile; ++j) {
      block.attend(read_only(keys_.tile(key_head(h), j)), read_only(values_.tile(key_head(h), j)), mask(first, j, k_.window));
    }
    float lse[kTile];
    block.finish(out_.tile(h, tile), lse);
  }

  static TileRows<const T> read_only(TileRows<T> rows) { return {rows.first, rows.stride, rows.rows, rows.head_dim}; }

  const CachedAttention& k_;
  int64_t rows_, d_;
  HeadRows<const T> qkv_;
  HeadRows<T> out_, keys_, values_;
};

}  // namespace

void CpuBackend::execute(const CachedAttention& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  k.qkv.dtype() == Dtype::bf16 ? Cached<bf16>(k).run() : Cached<float>(k).run();
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
  QueryBlockBackward(TileRows<const T> queries, TileRows<const T> out, TileRows<const T> dout, const float* lse, float scale)
      : rows_(queries.rows), ld_(round_up(queries.head_dim, 16)), scale_(scale) {
    const int64_t padded = round_up(rows_, 8);
    widen_tile(queries, scale, queries_, ld_);
    widen_tile(dout, 1.0F, douts_, ld_);
    widen_tile(out, 1.0F, keys_, ld_);
    dot_rows(douts_, keys_, padded, ld_, statistics_.delta);
    std::fill(std::copy_n(lse, rows_, statistics_.lse), statistics_.lse + padded, 0.0F);
    transpose_tile(queries_, padded, ld_, queries_transposed_);
    transpose_tile(douts_, padded, ld_, douts_transposed_);
  }

  template <class T>
  void attend(TileRows<const T> keys, TileRows<const T> values, const TileMask& mask, KeyGradients gradients) {
    widen_tile(keys, 1.0F, keys_, ld_);
    widen_tile(values, 1.0F, values_, ld_);
    const auto gemm = [&](const float* a, const float* b, float* out) {
      return BlockGemm{.a = a, .b = b, .out = out, .keys = keys.rows, .queries = rows_, .ld = ld_};
    };
    score_gemm(gemm(keys_, queries_transposed_, p_), mask);
    score_gemm(gemm(values_, douts_transposed_, ds_), mask);
    gradient_tile(p_, ds_, round_up(keys.rows, 8), round_up(rows_, 8), mask, statistics_);
    key_gradient(p_, douts_, gradients.dvalue, keys.rows, mask);
    key_gradient(ds_, queries_, gradients.dkey, keys.rows, mask);
    query_gemm(gemm(ds_, keys_, dqueries_), mask, !empty_);
    empty_ = false;
  }

  template <class T>
  void finish(TileRows<T> dqueries) {
    float factor[kTile];
    std::fill_n(factor, kTile, scale_);
    store_tile(dqueries_, ld_, factor, dqueries);
  }

 private:
  // out [keys, ld] += a [keys, queries] * b [queries, ld]
  void key_gradient(const float* a, const float* b, float* out, int64_t keys, const TileMask& mask) const {
    tile_gemm({.a = a,
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
               .triangle = mask.diagonal ? Triangle::a_upper : Triangle::none});
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
  QueryStatistics statistics_;
  int64_t rows_, ld_;
  float scale_;
  bool empty_ = true;
};

template <class T>
class Backward {
 public:
  explicit Backward(const AttentionBackward& k)
      : k_(k),
        d_(k.layout.head_dim),
        ld_(round_up(d_, 16)),
        length_(k.qkv.dim(0) / k.batch),
        tiles_(ceil_div(length_, kTile)),
        group_(k.layout.heads / k.layout.kv_heads),
        key_heads_(k.batch * k.layout.kv_heads),
        parts_(std::max<int64_t>(1, std::min(kWantedPieces / key_heads_, tiles_ * group_ / kLeastBlocks))),
        memory_(k.qkv.device().allocate(key_heads_ * parts_ * 2 * tiles_ * kTile * ld_ * int64_t{sizeof(float)})),
        sums_(reinterpret_cast<float*>(memory_.get())) {}

  void run() {
    parallel_for(key_heads_ * parts_, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) query_blocks(i / parts_, i % parts_);
    });
    parallel_for(key_heads_ * tiles_, 1, Subnormals::flushed, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) add_parts(i / tiles_, i % tiles_);
    });
  }

 private:
  KeyGradients sums(int64_t key_head, int64_t part, int64_t tile) const {
    float* dkey = sums_ + ((key_head * parts_ + part) * 2 * tiles_ + tile) * kTile * ld_;
    return {dkey, dkey + tiles_ * kTile * ld_};
  }

  // Goes over blocks part, part + parts, ... of the queries that read the key head.
  void query_blocks(int64_t key_head, int64_t part) {
    std::fill_n(sums(key_head, part, 0).dkey, 2 * tiles_ * kTile * ld_, 0.0F);
    const int64_t b = key_head / k_.layout.kv_heads, kv = key_head % k_.layout.kv_heads;
    for (int64_t i = part; i < group_ * tiles_; i += parts_) query_block(b, kv, kv * group_ + i / tiles_, i % tiles_, part);
  }

  void query_block(int64_t b, int64_t kv, int64_t h, int64_t tile, int64_t part) {
    const HeadRows<const T> qkv = sequence<const T>(k_.qkv, b, k_.batch, d_);
    const FirstKeys first_keys(k_.segment_starts, b, length_, k_.window);
    const int64_t key = k_.layout.heads + kv, value = key + k_.layout.kv_heads;
    QueryBlockBackward block(qkv.tile(h, tile), sequence<const T>(k_.out, b, k_.batch, d_).tile(h, tile),
                             sequence<const T>(k_.dout, b, k_.batch, d_).tile(h, tile),
                             k_.lse.template device_data<float>() + (b * k_.layout.heads + h) * length_ + tile * kTile,
                             static_cast<float>(k_.scale));
    for (int64_t j = first_keys.first_tile(tile); j <= tile; ++j) {
      block.attend(qkv.tile(key, j), qkv.tile(value, j), first_keys.mask(tile, j), sums(b * k_.layout.kv_heads + kv, part, j));
    }
    block.finish(sequence<T>(k_.dqkv, b, k_.batch, d_).tile(h, tile));
  }

  void add_parts(int64_t key_head, int64_t tile) {
    const KeyGradients total = sums(key_head, 0, tile);
    for (int64_t part = 1; part < parts_; ++part) {
      const KeyGradients more = sums(key_head, part, tile);
      add_tile(total.dkey, more.dkey, kTile * ld_);
      add_tile(total.dvalue, more.dvalue, kTile * ld_);
    }
    const int64_t b = key_head / k_.layout.kv_heads, key = k_.layout.heads + key_head % k_.layout.kv_heads;
    const HeadRows<T> dqkv = sequence<T>(k_.dqkv, b, k_.batch, d_);
    float factor[kTile];
    std::fill_n(factor, kTile, 1.0F);
    store_tile(total.dkey, ld_, factor, dqkv.tile(key, tile));
    store_tile(total.dvalue, ld_, factor, dqkv.tile(key + k_.layout.kv_heads, tile));
  }

  const AttentionBackward& k_;
  int64_t d_, ld_, length_, tiles_, group_, key_heads_, parts_;
  std::shared_ptr<std::byte> memory_;
  float* sums_;  // [key_heads, parts, dk and dv, tiles * kTile, ld]
};

}  // namespace

void CpuBackend::execute(const AttentionBackward& k) {
  if (k.layout.head_dim > kLargestHead) return CpuReference::execute(k);
  check_segment_starts("attention backward", k.segment_starts, k.qkv.dim(0) / k.batch);
  k.qkv.dtype() == Dtype::bf16 ? Backward<bf16>(k).run() : Backward<float>(k).run();
}

}  // namespace mantissa
