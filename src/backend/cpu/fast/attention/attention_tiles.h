// The steps of blocked attention on one block of queries and one block of keys, in fp32 scratch. Scores lie transposed, s[key * kTile +
// query]: the softmax then runs down the lanes, and the GEMMs above need no packing beyond the transposed queries.
#pragma once

#include <cstdint>

#include "mantissa/base/integers.h"
#include "mantissa/formats/bf16.h"

namespace mantissa {

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
struct TileGemm {
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

void tile_gemm(const TileGemm& t);

inline constexpr int64_t kTile = 64;          // queries and keys of a block
inline constexpr int64_t kLargestHead = 256;  // head_dim that the scratch of a thread has room for
inline constexpr float kNoScore = -3.0e38F;   // the running maximum before the first key

// Rows of head_dim values in memory, `stride` elements apart.
template <class T>
struct TileRows {
  T* first;
  int64_t stride, rows, head_dim;
};

// to [rows rounded up to 8, ld] = from * scale, in fp32; zero past its rows and columns. ld is head_dim rounded up to 16.
void widen_tile(TileRows<const float> from, float scale, float* to, int64_t ld);
void widen_tile(TileRows<const bf16> from, float scale, float* to, int64_t ld);

// to = from [rows, ld] * row_scale [rows], rounded.
void store_tile(const float* from, int64_t ld, const float* row_scale, TileRows<float> to);
void store_tile(const float* from, int64_t ld, const float* row_scale, TileRows<bf16> to);

// to [columns, kTile] = transpose of from [rows, columns]; both multiples of 8. Columns of `to` past `rows` up to a multiple of 16 are
// zero.
void transpose_tile(const float* from, int64_t rows, int64_t columns, float* to);

// Query i of the block attends to the keys first[i] .. last[i] of it.
struct TileMask {
  alignas(32) int32_t first[kTile];
  alignas(32) int32_t last[kTile];
  bool diagonal;  // last[i] = i: the first key block of which nothing past the diagonal is computed
  bool partial;   // some key of the block is hidden from some query
};

// Online softmax (Milakov and Gimelshein 2018) of `queries` columns (rounded up to 8) of s [keys, kTile]: s becomes exp(s - maximum),
// hidden ones zero; maximum and sum are brought up to date, and rescale = exp(old maximum - new maximum).
struct SoftmaxTile {
  alignas(32) float maximum[kTile];
  alignas(32) float sum[kTile];
  alignas(32) float rescale[kTile];
};
void softmax_tile(float* s, int64_t keys, int64_t queries, const TileMask& mask, SoftmaxTile& state);

// Statistics of the queries of a block. gradient_tile() turns s, the transposed scores, into p = exp(s - lse), and dp = dout v, transposed
// likewise, into ds = p (dp - delta); hidden ones become zero.
struct QueryStatistics {
  alignas(32) float lse[kTile];
  alignas(32) float delta[kTile];
};
void gradient_tile(float* s, float* dp, int64_t keys, int64_t queries, const TileMask& mask, const QueryStatistics& statistics);

// out [rows, ld] *= row_scale [rows]
void scale_rows(float* out, int64_t rows, int64_t ld, const float* row_scale);
// out [rows] = sums of a * b over the rows of [rows, ld]
void dot_rows(const float* a, const float* b, int64_t rows, int64_t ld, float* out);
// to [count] += from; count is a multiple of 8.
void add_tile(float* to, const float* from, int64_t count);

}  // namespace mantissa
