// Sums over rows in a fixed order: of pieces of rows, then of the pieces.
#pragma once

#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa::gpu {

inline constexpr int64_t kRowsOfPiece = 32;

// partials[piece, j] = sum over the rows i of a piece of term(i, first)[j - first], for j in [0, cols). A thread has a pack of columns of a
// piece.
template <class Term>
__global__ void __launch_bounds__(kThreads) sum_pieces(Term term, int64_t rows, int64_t cols, float* partials) {
  const int64_t packs = ceil_div(cols, int64_t{kPack});
  for_each_element(ceil_div(rows, kRowsOfPiece) * packs, [=](int64_t i) {
    const int64_t piece = i / packs, first_row = piece * kRowsOfPiece, column = i % packs * kPack,
                  end = first_row + kRowsOfPiece < rows ? first_row + kRowsOfPiece : rows;
    Pack sum{};
    MANTISSA_UNROLL_BY(4)
    for (int64_t row = first_row; row < end; ++row) {
      const Pack more = term(row, column);
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kPack; ++j) sum.at[j] += more.at[j];
    }
    Packs<float>{partials + piece * cols, cols, cols % kPack == 0}.write(column, sum);
  });
}

// A term of sum_pieces(): the rows of a matrix themselves.
template <class T>
struct RowTerm {
  Packs<const T> first_row;

  __device__ Pack operator()(int64_t row, int64_t first) const { return first_row.row(row).read(first); }
};

// Sums of the columns of a block, by each of its warps.
struct SumsOfColumns {
  float at[kWarpsOfBlock][kWarp];
};

// first[j] (+)= sum over pieces of partials [pieces, cols]. A block has 32 columns, of which each warp adds every eighth piece. A grid of
// twice as many blocks adds partials [2, pieces, cols], also into the second output.
template <class Out>
__global__ void __launch_bounds__(kThreads)
    add_pieces(const float* partials, int64_t pieces, int64_t cols, Out* first, Out* second, bool accumulate) {
  auto& sums = block_shared<SumsOfColumns>().at;
  const int64_t across = ceil_div(cols, int64_t{kWarp});
  const bool is_first = block() < across;
  const int64_t column = (is_first ? block() : block() - across) * kWarp + lane();
  const float* const from = is_first ? partials : partials + pieces * cols;
  Out* const out = is_first ? first : second;
  float sum = 0.0F;
  MANTISSA_UNROLL_BY(8)
  for (int64_t piece = warp(); piece < pieces; piece += kWarpsOfBlock) sum += column < cols ? from[piece * cols + column] : 0.0F;
  sums[warp()][lane()] = sum;
  barrier();
  if (warp() > 0 || column >= cols) return;
  for (unsigned w = 1; w < kWarpsOfBlock; ++w) sum += sums[w][lane()];
  out[column] = accumulate ? out[column] + sum : sum;
}

// Up to 256 columns of each warp of a block.
struct alignas(16) ColumnsOfWarps {
  float at[kWarpsOfBlock][kColumnsOfPacks];
};

// out[j], for the columns j in [0, cols) of pack p, of `packs` of a lane, is the sum over the teams of a block, which have 2^team warps
// each. Warp w of a team has packs * kColumnsOfPacks columns, those from w times as many on. All threads call it.
__device__ inline void add_warps(const Pack& own, unsigned team, unsigned packs, unsigned p, int64_t cols, float* out) {
  static_assert(kColumnsOfPacks == kThreads);
  auto& columns = block_shared<ColumnsOfWarps>().at;
  barrier();  // behind those that still read earlier ones
  store(&columns[warp()][lane() * kPack], own);
  barrier();
  MANTISSA_UNROLL_BY(1)
  for (unsigned part = 0; part < 1U << team; ++part) {
    const int64_t column = (part * packs + p) * kColumnsOfPacks + thread();
    if (column >= cols) return;
    float sum = columns[part][thread()];
    MANTISSA_UNROLL_BY(1)
    for (unsigned w = part + (1U << team); w < kWarpsOfBlock; w += 1U << team) sum += columns[w][thread()];
    out[column] = sum;
  }
}

// Grids of sum_pieces() and add_pieces().
inline Grid grid_of_pieces(int64_t rows, int64_t cols) {
  return {blocks_for(ceil_div(rows, kRowsOfPiece) * ceil_div(cols, int64_t{kPack})), kThreads};
}
inline Grid grid_of_columns(int64_t cols) { return {ceil_div(cols, int64_t{kWarp}), kThreads}; }

}  // namespace mantissa::gpu

namespace mantissa {

template <class Term>
void CudaBackend::sum_rows(const Term& term, int64_t rows, int64_t cols, const Tensor& out, bool accumulate) {
  const int64_t pieces = ceil_div(rows, gpu::kRowsOfPiece);
  const Tensor partials = empty(*this, Dtype::f32, {pieces * cols});
  launch(gpu::sum_pieces<Term>, gpu::grid_of_pieces(rows, cols), term, rows, cols, partials.device_data<float>());
  launch(gpu::add_pieces<float>, gpu::grid_of_columns(cols), partials.device_data<float>(), pieces, cols, out.device_data<float>(), nullptr,
         accumulate);
}

}  // namespace mantissa
