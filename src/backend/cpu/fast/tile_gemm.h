// GEMMs of blocks that lie in cache, the inner loops of attention. fp32 with explicit fma; every sum runs over the depth in
// order.
#pragma once

#include <cstdint>

namespace mantissa {

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

}  // namespace mantissa
