// The steps of blocked attention on one block of queries and one block of keys, in fp32 scratch. Scores lie transposed, s[key * kTile +
// query]: the softmax then runs down the lanes, and the GEMMs need no packing beyond the transposed queries.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "backend/cpu/fast/simd.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/bf16.h"

namespace mantissa::tiles {

// The steps are bodies of cloned<> (simd.h), except gemm(), which chooses among its own.

using simd::Floats, simd::kLanes;

inline constexpr int64_t kTile = 64;          // queries and keys of a block
inline constexpr int64_t kLargestHead = 256;  // head_dim that the scratch of a thread has room for
inline constexpr float kNoScore = -3.0e38F;   // the running maximum before the first key

// GEMMs of blocks that lie in cache, the inner loops of attention. fp32 with explicit fma; every sum runs over the depth in
// order.

// The half of a square GEMM that is zero or not wanted; whole groups of rows and columns are skipped there, the rest is computed as it is.
enum class Triangle {
  none,
  a_lower,   // a[i, p] is zero for p > i
  a_upper,   // a[i, p] is zero for p < i
  out_upper  // out[i, j] is wanted for j >= i only
};

// out [rows, cols] (+)= a [rows, depth] * b [depth, cols]. rows is a multiple of 8, cols of 16; rows of b and out are 16-float aligned.
struct Gemm {
  const float* a;
  int64_t lda;
  bool a_transposed;  // a[i, p] lies at a[p * lda + i], else at a[i * lda + p]
  const float* b;
  int64_t ldb;
  float* out;
  int64_t ldo;
  int64_t rows, cols, depth;
  bool accumulate;
  Triangle triangle = Triangle::none;
};

// One register of the instruction set at hand. Wider vectors than the machine's live in memory, so each width has its own GEMM.
using Vector8 [[gnu::vector_size(32), gnu::may_alias]] = float;
using Vector16 [[gnu::vector_size(64), gnu::may_alias]] = float;

template <class V>
inline constexpr int kLanesOf = static_cast<int>(sizeof(V) / sizeof(float));

// Written lane by lane: this form, and no loop, becomes one vector fma.
template <class V, size_t... Lane>
[[gnu::always_inline]] inline void fma_lanes(V& c, const V& a, const V& b, std::index_sequence<Lane...>) {
  c = V{__builtin_fmaf(a[Lane], b[Lane], c[Lane])...};
}

// out [R, N vectors] (+)= a [R, first .. last) * b [first .. last, N vectors], all of out in registers.
template <class V, int R, int N, bool kTransposed>
[[gnu::always_inline]] inline void micro_kernel(const Gemm& t, int64_t row, int64_t col, int64_t first, int64_t last) {
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
[[gnu::always_inline]] inline void panels(const Gemm& t) {
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

MANTISSA_TARGET("x86-64-v4") inline void panels16(const Gemm& t) { panels<Vector16, 8, 2, false>(t); }
MANTISSA_TARGET("x86-64-v4") inline void panels16_transposed(const Gemm& t) { panels<Vector16, 8, 2, true>(t); }

inline void gemm(const Gemm& t) {
  if (cpu_level() == CpuLevel::x86_64_v4) {
    t.a_transposed ? panels16_transposed(t) : panels16(t);
  } else {
    t.a_transposed ? cloned<panels<Vector8, 4, 2, true>>(t) : cloned<panels<Vector8, 4, 2, false>>(t);
  }
}

// Rows of head_dim values in memory, `stride` elements apart.
template <class T>
struct Rows {
  T* first;
  int64_t stride, rows, head_dim;
};

// to [rows rounded up to 8, ld] = from * scale, in fp32; zero past its rows and columns. ld is head_dim rounded up to 16.
template <class T>
[[gnu::always_inline]] inline void widen(Rows<const T> from, float scale, float* to, int64_t ld) {
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

// to = from [rows, ld] * row_scale [rows], rounded.
template <class T>
[[gnu::always_inline]] inline void narrow(const float* from, int64_t ld, const float* row_scale, Rows<T> to) {
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

// to [columns, kTile] = transpose of from [rows, columns]; both multiples of 8. Columns of `to` past `rows` up to a multiple of 16 are
// zero.
[[gnu::always_inline]] inline void transpose(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t r = 0; r < rows; r += 8) {
    for (int64_t c = 0; c < columns; c += 8) transpose8(from + r * columns + c, columns, to + c * kTile + r);
  }
  if (rows % 16 == 0) return;
  for (int64_t c = 0; c < columns; ++c) simd::store(to + c * kTile + rows, Floats{});
}

// Query i of the block attends to the keys first[i] .. last[i] of it.
struct Mask {
  alignas(32) int32_t first[kTile];
  alignas(32) int32_t last[kTile];
  bool diagonal;  // last[i] = i: the first key block of which nothing past the diagonal is computed
  bool partial;   // some key of the block is hidden from some query
};

using Ints [[gnu::vector_size(32)]] = int32_t;

[[gnu::always_inline]] inline Ints load_ints(const int32_t* from) { return *reinterpret_cast<const Ints*>(from); }

// Returns the lanes, of eight queries, that see key k.
[[gnu::always_inline]] inline Ints visible(int64_t k, Ints first, Ints last) {
  const Ints key = Ints{} + static_cast<int32_t>(k);
  return (key >= first) & (key <= last);
}

struct Softmax {
  alignas(32) float maximum[kTile];
  alignas(32) float sum[kTile];
  alignas(32) float rescale[kTile];
};

template <bool kMasked>
[[gnu::always_inline]] inline void softmax_columns(float* s, int64_t keys, Ints first, Ints last, Softmax& state, int64_t q) {
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

// Online softmax (Milakov and Gimelshein 2018) of `queries` columns (rounded up to 8) of s [keys, kTile]: s becomes exp(s - maximum),
// hidden ones zero; maximum and sum are brought up to date, and rescale = exp(old maximum - new maximum).
[[gnu::always_inline]] inline void softmax(float* s, int64_t keys, int64_t queries, const Mask& mask, Softmax& state) {
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

// Statistics of the queries of a block.
struct Statistics {
  alignas(32) float lse[kTile];
  alignas(32) float delta[kTile];
};

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

// Turns s, the transposed scores, into p = exp(s - lse), and dp = dout v, transposed likewise, into ds = p (dp - delta); hidden ones become
// zero.
[[gnu::always_inline]] inline void gradient(float* s, float* dp, int64_t keys, int64_t queries, const Mask& mask,
                                            const Statistics& statistics) {
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

// out [rows, ld] *= row_scale [rows]
[[gnu::always_inline]] inline void scale(float* out, int64_t rows, int64_t ld, const float* row_scale) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = 0; j < ld; j += kLanes) simd::store(out + r * ld + j, simd::load(out + r * ld + j) * row_scale[r]);
  }
}

// out [rows] = sums of a * b over the rows of [rows, ld]
[[gnu::always_inline]] inline void dot(const float* a, const float* b, int64_t rows, int64_t ld, float* out) {
  for (int64_t r = 0; r < rows; ++r) {
    Floats sum = {};
    for (int64_t j = 0; j < ld; j += kLanes) sum = simd::fma(simd::load(a + r * ld + j), simd::load(b + r * ld + j), sum);
    out[r] = simd::sum(sum);
  }
}

// to [count] += from; count is a multiple of 8.
[[gnu::always_inline]] inline void add(float* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) simd::store(to + i, simd::load(to + i) + simd::load(from + i));
}

}  // namespace mantissa::tiles
