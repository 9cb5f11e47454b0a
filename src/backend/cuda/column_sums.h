// Sums over rows in a fixed order: of pieces of rows, then of the pieces.
#pragma once

#include "backend/cuda/values.h"

namespace mantissa::gpu {

inline constexpr int64_t kRowsOfPiece = 64;

// partials[piece, j] = sum over the rows i of a piece of term(i, j), j in [0, cols). A thread has a column of a piece.
template <class Term>
__global__ void __launch_bounds__(kThreads) sum_pieces(Term term, int64_t rows, int64_t cols, float* partials) {
  for_each_element(ceil_div(rows, kRowsOfPiece) * cols, [=](int64_t i) {
    const int64_t first = i / cols * kRowsOfPiece, column = i % cols, end = first + kRowsOfPiece < rows ? first + kRowsOfPiece : rows;
    float sum = 0.0F;
    for (int64_t row = first; row < end; ++row) sum += term(row, column);
    partials[i] = sum;
  });
}

// out[j] (+)= sum over pieces.
template <class Out>
__global__ void __launch_bounds__(kThreads) add_pieces(const float* partials, int64_t pieces, int64_t cols, Out* out, bool accumulate) {
  for_each_element(cols, [=](int64_t column) {
    float sum = 0.0F;
    for (int64_t piece = 0; piece < pieces; ++piece) sum += partials[piece * cols + column];
    out[column] = accumulate ? out[column] + sum : sum;
  });
}

}  // namespace mantissa::gpu
