#include "backend/cpu/fast/attention_tiles.h"

#include <algorithm>

#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/simd.h"

namespace mantissa {
namespace {

using simd::Floats;
using simd::kLanes;
using Ints [[gnu::vector_size(32)]] = int32_t;

[[gnu::always_inline]] inline Ints load_ints(const int32_t* from) { return *reinterpret_cast<const Ints*>(from); }

template <class T>
[[gnu::always_inline]] inline void widen(TileRows<const T> from, float scale, float* to, int64_t ld) {
  for (int64_t r = 0; r < from.rows; ++r) {
    const T* row = from.first + r * from.stride;
    float* out = to + r * ld;
    simd::for_lanes(
        from.head_dim, [&](int64_t j, auto part)
                           __attribute__((always_inline)) { simd::store(out + j, simd::load(row + j, part) * scale); });
    for (int64_t j = round_up(from.head_dim, kLanes); j < ld; j += kLanes) simd::store(out + j, Floats{});
  }
  std::fill(to + from.rows * ld, to + round_up(from.rows, 8) * ld, 0.0F);
}

template <class T>
[[gnu::always_inline]] inline void narrow(const float* from, int64_t ld, const float* row_scale, TileRows<T> to) {
  for (int64_t r = 0; r < to.rows; ++r) {
    const float factor = row_scale[r];
    simd::for_lanes(
        to.head_dim, [&](int64_t j, auto part) __attribute__((always_inline)) {
          simd::store(to.first + r * to.stride + j, simd::load(from + r * ld + j) * factor, part);
        });
  }
}

// Transposes 8 x 8 elements: pairs, then quadruples, then halves change places.
[[gnu::always_inline]] inline void transpose8(const float* from, int64_t ld, float* to) {
  Floats a[8], b[8];
  for (int64_t i = 0; i < 8; ++i) a[i] = simd::load(from + i * ld);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = __builtin_shufflevector(a[i], a[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    b[i + 1] = __builtin_shufflevector(a[i], a[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int top = (i & 1) + (i & 2) * 2;
    a[top] = __builtin_shufflevector(b[top], b[top + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    a[top + 2] = __builtin_shufflevector(b[top], b[top + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    simd::store(to + i * kTile, __builtin_shufflevector(a[i], a[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    simd::store(to + (i + 4) * kTile, __builtin_shufflevector(a[i], a[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

// Returns the lanes, of eight queries, that see key k.
[[gnu::always_inline]] inline Ints visible(int64_t k, Ints first, Ints last) {
  const Ints key = Ints{} + static_cast<int32_t>(k);
  return (key >= first) & (key <= last);
}

template <bool kMasked>
[[gnu::always_inline]] inline void softmax_columns(float* s, int64_t keys, Ints first, Ints last, SoftmaxTile& state, int64_t q) {
  const Floats none = Floats{} + kNoScore, old = simd::load(state.maximum + q);
  Floats top[2] = {old, none};
  for (int64_t k = 0; k < keys; ++k) {
    const Floats score = simd::load(s + k * kTile);
    top[k & 1] = simd::max(top[k & 1], kMasked ? (visible(k, first, last) ? score : none) : score);
  }
  const Floats maximum = simd::max(top[0], top[1]), rescale = simd::exp(old - maximum);
  Floats sum[2] = {simd::load(state.sum + q) * rescale, Floats{}};
  for (int64_t k = 0; k < keys; ++k) {
    Floats p = simd::exp(simd::load(s + k * kTile) - maximum);
    if (kMasked) p = visible(k, first, last) ? p : Floats{};
    sum[k & 1] += p;
    simd::store(s + k * kTile, p);
  }
  simd::store(state.maximum + q, maximum);
  simd::store(state.sum + q, sum[0] + sum[1]);
  simd::store(state.rescale + q, rescale);
}

template <bool kMasked>
[[gnu::always_inline]] inline void gradient_columns(float* s, float* dp, int64_t keys, Ints first, Ints last, Floats lse, Floats delta) {
  for (int64_t k = 0; k < keys; ++k) {
    Floats p = simd::exp(simd::load(s + k * kTile) - lse), ds = p * (simd::load(dp + k * kTile) - delta);
    if (kMasked) {
      const Ints seen = visible(k, first, last);
      p = seen ? p : Floats{};
      ds = seen ? ds : Floats{};
    }
    simd::store(s + k * kTile, p);
    simd::store(dp + k * kTile, ds);
  }
}

[[gnu::always_inline]] inline void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r += 8) {
    for (int64_t c = 0; c < columns; c += 8) transpose8(from + r * columns + c, columns, to + c * kTile + r);
  }
  if (rows % 16 == 0) return;
  for (int64_t c = 0; c < columns; ++c) simd::store(to + c * kTile + rows, Floats{});
}

[[gnu::always_inline]] inline void softmax(float* s, int64_t keys, int64_t queries, const TileMask& mask, SoftmaxTile& state) {
  for (int64_t q = 0; q < queries; q += kLanes) {
    const Ints first = load_ints(mask.first + q), last = load_ints(mask.last + q);
    const int64_t seen = mask.diagonal ? std::min(keys, q + kLanes) : keys;
    if (mask.partial) {
      softmax_columns<true>(s + q, seen, first, last, state, q);
    } else {
      softmax_columns<false>(s + q, seen, first, last, state, q);
    }
  }
}

[[gnu::always_inline]] inline void gradient(float* s, float* dp, int64_t keys, int64_t queries, const TileMask& mask,
                                            const QueryStatistics& statistics) {
  for (int64_t q = 0; q < queries; q += kLanes) {
    const Ints first = load_ints(mask.first + q), last = load_ints(mask.last + q);
    const Floats lse = simd::load(statistics.lse + q), delta = simd::load(statistics.delta + q);
    const int64_t seen = mask.diagonal ? std::min(keys, q + kLanes) : keys;
    if (mask.partial) {
      gradient_columns<true>(s + q, dp + q, seen, first, last, lse, delta);
    } else {
      gradient_columns<false>(s + q, dp + q, seen, first, last, lse, delta);
    }
  }
}

[[gnu::always_inline]] inline void scale(float* out, int64_t rows, int64_t ld, const float* row_scale) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < ld; j += kLanes) simd::store(out + r * ld + j, simd::load(out + r * ld + j) * row_scale[r]);
  }
}

[[gnu::always_inline]] inline void dot(const float* a, const float* b, int64_t rows, int64_t ld, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    Floats sum = {};
    for (int64_t j = 0; j < ld; j += kLanes) sum = simd::fma(simd::load(a + r * ld + j), simd::load(b + r * ld + j), sum);
    out[r] = simd::sum(sum);
  }
}

[[gnu::always_inline]] inline void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) simd::store(to + i, simd::load(to + i) + simd::load(from + i));
}

}  // namespace

void widen_tile(TileRows<const float> from, float scale, float* to, int64_t ld) { cloned<widen<float>>(from, scale, to, ld); }
void widen_tile(TileRows<const bf16> from, float scale, float* to, int64_t ld) { cloned<widen<bf16>>(from, scale, to, ld); }

void store_tile(const float* from, int64_t ld, const float* row_scale, TileRows<float> to) {
  cloned<narrow<float>>(from, ld, row_scale, to);
}
void store_tile(const float* from, int64_t ld, const float* row_scale, TileRows<bf16> to) { cloned<narrow<bf16>>(from, ld, row_scale, to); }

void transpose_tile(const float* from, int64_t rows, int64_t columns, float* to) { cloned<transpose>(from, rows, columns, to); }

void softmax_tile(float* s, int64_t keys, int64_t queries, const TileMask& mask, SoftmaxTile& state) {
  cloned<softmax>(s, keys, queries, mask, state);
}

void gradient_tile(float* s, float* dp, int64_t keys, int64_t queries, const TileMask& mask, const QueryStatistics& statistics) {
  cloned<gradient>(s, dp, keys, queries, mask, statistics);
}

void scale_rows(float* out, int64_t rows, int64_t ld, const float* row_scale) { cloned<scale>(out, rows, ld, row_scale); }

void dot_rows(const float* a, const float* b, int64_t rows, int64_t ld, float* out) { cloned<dot>(a, b, rows, ld, out); }

void add_tile(float* to, const float* from, int64_t count) { cloned<add>(to, from, count); }

}  // namespace mantissa
