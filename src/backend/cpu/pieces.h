// Cuts the work of the fast kernels for parallel_for. Pieces depend on the shape only, so partial sums, and with them results, are the same
// for any number of threads. Work of one piece runs inline: starting threads costs as much as some ten thousand elements in cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "mantissa/base/integers.h"

namespace mantissa {

inline constexpr int64_t kPieceElements = 32768;  // a few hundred KB of traffic: long against the start of a piece, short against a step

// Rows of `columns` elements in a piece.
inline int64_t rows_per_piece(int64_t columns) { return std::max<int64_t>(1, kPieceElements / std::max<int64_t>(1, columns)); }

// Like rows_per_piece(), but where every piece leaves partial sums of `columns` elements: at most 64 pieces, so that adding them stays
// cheap.
inline int64_t rows_per_partial(int64_t rows, int64_t columns) { return std::max(rows_per_piece(columns), ceil_div(rows, 64)); }

}  // namespace mantissa
