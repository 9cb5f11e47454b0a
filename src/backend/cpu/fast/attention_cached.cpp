// Attention of generation. A prompt runs in blocks, as in training; the few rows of a step run row by row, each over its keys in chunks.
#include <algorithm>

#include "backend/cpu/fast/attention_heads.h"
#include "backend/cpu/fast/attention_query_block.h"
#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

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

}  // namespace mantissa
