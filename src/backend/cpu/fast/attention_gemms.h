// The two GEMMs that forward and backward pass of blocked attention share, with scores transposed as in attention_tiles.h.
#pragma once

#include "backend/cpu/fast/attention_tiles.h"
#include "backend/cpu/fast/tile_gemm.h"

namespace mantissa {

// Holds the operands of one GEMM of a block of `keys` keys with a block of `queries` queries; ld is the width of a row of either.
struct BlockGemm {
  const float *a, *b;
  float* out;
  int64_t keys, queries, ld;
};

// out [keys, queries] = a [keys, ld] * b [ld, queries], b as transpose_tile() leaves it
inline void score_gemm(const BlockGemm& p, const TileMask& mask) {
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
inline void query_gemm(const BlockGemm& p, const TileMask& mask, bool accumulate) {
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

}  // namespace mantissa
