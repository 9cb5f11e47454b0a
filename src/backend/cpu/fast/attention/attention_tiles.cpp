#include "backend/cpu/fast/attention/attention_tiles.h"

#include <algorithm>
#include <utility>

#include "backend/cpu/fast/simd.h"

namespace mantissa {
namespace {

// One register of the instruction set at hand. Wider vectors than the machine's live in memory, so each width has its own GEMM.
using Vector8 [[gnu::vector_size(32), gnu::may_alias]] = float;
using Vector16 [[gnu::vector_size(64), gnu::may_alias]] = float;

template <class V>
constexpr int kLanesOf = static_cast<int>(sizeof(V) / sizeof(float));

// Written lane by lane: this form, and no loop, becomes one vector fma.
template <class V, size_t... Lane>
[[gnu::always_inline]] inline void fma_lanes(V& c, const V& a, const V& b, std::index_sequence<Lane...>) {
  c = V{__builtin_fmaf(a[Lane], b[Lane], c[Lane])...};
}

// out [R, N vectors] (+)= a [R, first .. last) * b [first .. last, N vectors], all of out in registers.
template <class V, int R, int N, bool kTransposed>
[[gnu::always_inline]] inline void micro_kernel(const TileGemm& t, int64_t row, int64_t col, int64_t first, int64_t last) {
  V sum[size_t(R)][size_t(N)];
  float* out = t.out + row * t.ldo + col;
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sum[i][j] = t.accumulate ? *reinterpret_cast<const V*>(out + i * t.ldo + j * kLanesOf<V>) : V{};
  }
  const float* a = kTransposed ? t.a + row : t.a + row * t.lda;
  const float* b = t.b + col;
  for (int64_t p = first; p < last; ++p) {
    V bp[size_t(N)];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) bp[j] = *reinterpret_cast<const V*>(b + p * t.ldb + j * kLanesOf<V>);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const V ap = (kTransposed ? a[p * t.lda + i] : a[i * t.lda + p]) - V{};
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) fma_lanes(sum[i][j], ap, bp[j], std::make_index_sequence<kLanesOf<V>>());
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) *reinterpret_cast<V*>(out + i * t.ldo + j * kLanesOf<V>) = sum[i][j];
  }
}

// Goes over panels of columns outside, so that a panel of b stays in the first-level cache while a streams past.
template <class V, int R, int N, bool kTransposed>
[[gnu::always_inline]] inline void gemm(const TileGemm& t) {
  constexpr int64_t kPanel = N * kLanesOf<V>;
  for (int64_t col = 0; col < t.cols; col += kPanel) {
    const int64_t rows = t.triangle == Triangle::out_upper ? std::min(t.rows, col + kPanel) : t.rows;
    for (int64_t row = 0; row < rows; row += R) {
      const int64_t first = t.triangle == Triangle::a_upper ? row : 0;
      const int64_t last = t.triangle == Triangle::a_lower ? std::min(t.depth, row + R) : t.depth;
      const bool right_half_only = t.triangle == Triangle::out_upper && row >= col + kPanel / 2;
      if (kPanel > 16 && col + kPanel > t.cols) {
        micro_kernel<V, R, 1, kTransposed>(t, row, col, first, last);
      } else if (kPanel > 16 && right_half_only) {
        micro_kernel<V, R, 1, kTransposed>(t, row, col + 16, first, last);
      } else {
        micro_kernel<V, R, N, kTransposed>(t, row, col, first, last);
      }
    }
  }
}

MANTISSA_TARGET("x86-64-v4") void gemm16(const TileGemm& t) { gemm<Vector16, 8, 2, false>(t); }
MANTISSA_TARGET("x86-64-v4") void gemm16_transposed(const TileGemm& t) { gemm<Vector16, 8, 2, true>(t); }

}  // namespace

void tile_gemm(const TileGemm& t) {
  if (cpu_level() == CpuLevel::x86_64_v4) {
    t.a_transposed ? gemm16_transposed(t) : gemm16(t);
  } else {
    t.a_transposed ? cloned<gemm<Vector8, 4, 2, true>>(t) : cloned<gemm<Vector8, 4, 2, false>>(t);
  }
}

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
