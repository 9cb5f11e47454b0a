// GEMMs of bf16 by mma.sync, and of groups of rows that the host does not know. On Hopper and later cuBLASLt multiplies, so this is the
// path of other GPUs and libraries, and of small groups (backend/gemm_path.h).
#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/gemm_operand.h"

namespace mantissa {
namespace {

using namespace gpu;

// GEMMs on tensor cores, in the manner of CUTLASS for compute capability 8.0. A block sums a tile of kMmaRows x kMmaCols in fp32, in
// ascending order of depth; tiles of bf16 operands are copied asynchronously into kMmaStages stages of shared memory while earlier ones are
// multiplied. Rows in memory begin at multiples of 16 bytes, and hold whole chunks of 8 elements.

// The sizes that decide the speed. A step reads (kMmaRows + kMmaCols) x kMmaDepth elements from L2 and multiplies for kMmaRows x kMmaCols
// sums, of which a warp has kWarpRows x kWarpCols in registers: the more it has, the less shared memory it reads for each. A multiprocessor
// has kMmaBlocks blocks, so that one begins or ends while the other multiplies.
constexpr unsigned kMmaRows = 128, kMmaCols = 128, kMmaDepth = 64, kMmaStages = 3;
constexpr unsigned kWarpRows = 64, kWarpCols = 64, kMmaBlocks = 2;

constexpr unsigned kMmaThreads = kMmaRows / kWarpRows * (kMmaCols / kWarpCols) * kWarp;
constexpr unsigned kSlice = 16, kSlices = kMmaDepth / kSlice;  // the depth of an instruction
constexpr unsigned kChunk = 8;                                 // elements; a chunk has 16 bytes
static_assert(kSlices % 2 == 0 && kMmaStages > 1);

// An operand in memory, op(a) or op(b)^T: [outer, depth] if it is contiguous along the depth (kByDepth), else [depth, outer], where `outer`
// are rows or columns of the product.
template <bool kByDepth>
struct MmaSide {
  const bf16* values;
  int64_t row;  // elements of a row in memory
};

// A tile of an operand in shared memory. It lies as in global memory, but swizzled: chunks change places within a row, so that ldmatrix,
// which reads a chunk of eight rows at a time, reads different banks.
template <bool kByDepth, unsigned kOuter>
struct alignas(16) MmaSideTile {
  static constexpr unsigned kRows = kByDepth ? kOuter : kMmaDepth, kChunks = kOuter * kMmaDepth / kRows / kChunk;
  static constexpr unsigned kPlaces = kChunks < 8 ? kChunks : 8, kRowsOfBanks = 8 / kPlaces;
  bf16 values[kOuter * kMmaDepth];

  // Returns the address of a chunk of row first + row, `first` being a multiple of eight.
  __device__ bf16* at(unsigned first, unsigned row, unsigned chunk) {
    return &values[((first + row) * kChunks + (chunk ^ row / kRowsOfBanks % kPlaces)) * kChunk];
  }
  // Loads 16 x 16 elements from `outer` and `k` on as mma.m16n8k16 has them in registers (PTX ISA): an A fragment, or the B fragments of
  // eight columns and of the next eight. Matrix 1 of ldmatrix, which becomes register 1, is the next eight rows of A, but the next eight of
  // the depth of B; operands that do not lie by depth are transposed.
  template <bool kOfA>
  __device__ void load_fragment(uint32_t (&out)[4], unsigned outer, unsigned k) {
    const unsigned row = kByDepth == kOfA ? lane() % 16 : lane() % 8 + lane() / 16 * 8;
    const unsigned chunk = kByDepth == kOfA ? lane() / 16 : lane() / 8 % 2;
    if constexpr (kByDepth) load_matrices(out, at(outer, row, k / kChunk + chunk));
    if constexpr (!kByDepth) load_matrices_transposed(out, at(k, row, outer / kChunk + chunk));
  }
};

template <bool kAByDepth, bool kBByDepth>
struct MmaTiles {
  struct Stage {
    MmaSideTile<kAByDepth, kMmaRows> a;
    MmaSideTile<kBByDepth, kMmaCols> b;
  };
  Stage stages[kMmaStages];
};
struct MmaFragments {  // fragments of a warp in a slice
  uint32_t a[kWarpRows / 16][4], b[kWarpCols / 16][4];
};
struct MmaSums {
  float at[kWarpRows / 16][kWarpCols / 8][4] = {};
};

__device__ unsigned warp_row() { return warp() / (kMmaCols / kWarpCols) * kWarpRows; }
__device__ unsigned warp_col() { return warp() % (kMmaCols / kWarpCols) * kWarpCols; }

// Elements of a range, at most `most`.
__device__ int elements_of(Range range, unsigned most) {
  const int64_t all = range.end - range.first;
  return static_cast<int>(all < int64_t{most} ? all : int64_t{most});
}

// The chunks of a side that a thread copies for each tile: the same one of every kApart-th row in memory.
template <bool kByDepth, unsigned kOuter>
class MmaCopies {
  using Tile = MmaSideTile<kByDepth, kOuter>;
  static constexpr unsigned kApart = kMmaThreads / Tile::kChunks;
  static_assert(Tile::kRows % kApart == 0 && kApart % 8 == 0);

 public:
  __device__ MmaCopies(const MmaSide<kByDepth>& side, Range outer, int64_t depth)
      : from_(side.values + (kByDepth ? outer.first + row() : depth + row()) * side.row + (kByDepth ? depth : outer.first) + col()),
        row_(side.row),
        outer_(elements_of(outer, kOuter)) {}

  // Copies the next tile: zeros outside the range and behind so many elements of the depth.
  __device__ void copy(Tile& tile, int depth) {
    const int rows = kByDepth ? outer_ : depth, cols = kByDepth ? depth : outer_;
    const int inside = static_cast<int>(col()) < cols ? rows - static_cast<int>(row()) : 0;
    bf16* const to = tile.at(0, row(), thread() % Tile::kChunks);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < Tile::kRows; i += kApart) {
      copy_async16(to + i * Tile::kChunks * kChunk, from_ + i * row_, static_cast<int>(i) < inside);
    }
    from_ += kByDepth ? kMmaDepth : kMmaDepth * row_;
  }

 private:
  __device__ static unsigned row() { return thread() / Tile::kChunks; }
  __device__ static unsigned col() { return thread() % Tile::kChunks * kChunk; }

  const bf16* from_;
  int64_t row_;
  int outer_;
};

template <class Stage>
__device__ void load_fragments(MmaFragments& out, Stage& stage, unsigned k) {
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kWarpRows / 16; ++i) stage.a.template load_fragment<true>(out.a[i], warp_row() + i * 16, k);
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kWarpCols / 16; ++j) stage.b.template load_fragment<false>(out.b[j], warp_col() + j * 16, k);
}

__device__ void multiply(const MmaFragments& of, MmaSums& sums) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kWarpCols / 16; ++j) {
    const uint32_t first[2] = {of.b[j][0], of.b[j][1]}, second[2] = {of.b[j][2], of.b[j][3]};
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kWarpRows / 16; ++i) {
      mma_bf16(sums.at[i][2 * j], of.a[i], first);
      mma_bf16(sums.at[i][2 * j + 1], of.a[i], second);
    }
  }
}

// sums += a * b over a depth. A warp loads the fragments of a slice while it multiplies those of the one before.
template <bool kA, bool kB>
__device__ void add_mma(MmaTiles<kA, kB>& tiles, const MmaSide<kA>& a, Range rows, const MmaSide<kB>& b, Range cols, Range depth,
                        MmaSums& sums) {
  MmaCopies<kA, kMmaRows> of_a(a, rows, depth.first);
  MmaCopies<kB, kMmaCols> of_b(b, cols, depth.first);
  const auto next = [](unsigned stage) { return stage + 1 == kMmaStages ? 0 : stage + 1; };
  unsigned to = 0, now = 0;  // the stages of the next copies and of the next fragments
  Range rest = depth;
  const auto copy_a = [&] {
    if (rest.first < rest.end) of_a.copy(tiles.stages[to].a, elements_of(rest, kMmaDepth));
  };
  const auto copy_b = [&] {
    if (rest.first < rest.end) of_b.copy(tiles.stages[to].b, elements_of(rest, kMmaDepth));
    commit_copies();
    rest.first += kMmaDepth;
    to = next(to);
  };
  // The copies of all threads into a stage are there, and all have loaded what they multiply from the one before it.
  const auto arrive = [] {
    wait_copies<kMmaStages - 2>();
    barrier();
  };
  for (unsigned stage = 0; stage + 1 < kMmaStages; ++stage) {
    copy_a();
    copy_b();
  }
  arrive();
  MmaFragments fragments[2];
  load_fragments(fragments[0], tiles.stages[now], 0);
  for (int64_t k = depth.first; k < depth.end; k += kMmaDepth) {
    MANTISSA_UNROLL
    for (unsigned slice = 0; slice < kSlices; ++slice) {
      if (slice == kSlices - 1) {
        arrive();
        now = next(now);
      }
      load_fragments(fragments[(slice + 1) % 2], tiles.stages[now], (slice + 1) % kSlices * kSlice);
      if (slice == 0) copy_a();
      if (slice == kSlices / 2 - 1) copy_b();
      multiply(fragments[slice % 2], sums);
    }
  }
}

// Four elements of a row, which one access moves. The compiler keeps bits together better than elements.
template <class Out>
struct alignas(4 * sizeof(Out)) Four {
  Out at[4];
};
template <class Out>
struct alignas(4 * sizeof(Out)) FourBits {
  uint64_t at[sizeof(Out) / 2];
};
template <class Out>
__device__ FourBits<Out> rounded_four(const float (&of)[4]) {
  const auto pair = [](uint32_t low, uint32_t high) { return uint64_t{low} | uint64_t{high} << 32; };
  const auto bits = [](float value) { return __builtin_bit_cast(uint32_t, value); };
  if constexpr (sizeof(Out) == sizeof(float)) return {pair(bits(of[0]), bits(of[1])), pair(bits(of[2]), bits(of[3]))};
  if constexpr (sizeof(Out) != sizeof(float)) return {pair(pack_bf16(of[0], of[1]), pack_bf16(of[2], of[3]))};
}

__device__ void add_bias(MmaSums& sums, const GemmBias& bias, Range cols) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kWarpCols / 8 * 2; ++j) {
    const int64_t col = cols.first + warp_col() + j / 2 * 8 + lane() % 4 * 2 + j % 2;
    const float value = col < cols.end ? bias[col] : 0.0F;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kWarpRows / 8; ++i) sums.at[i / 2][j / 2][i % 2 * 2 + j % 2] += value;
  }
}

// A lane has two neighboring columns of every eight (PTX ISA, m16n8k16). Lanes 2 i and 2 i + 1 exchange theirs of two fragments, left and
// right, so that each has four columns beside each other, which one store writes.
__device__ void exchange(float (&four)[4], const float* left, const float* right) {
  const bool odd = lane() % 2 != 0;
  const float first = shuffle_xor(odd ? left[0] : right[0], 1), second = shuffle_xor(odd ? left[1] : right[1], 1);
  four[0] = odd ? first : left[0], four[1] = odd ? second : left[1];
  four[2] = odd ? right[0] : first, four[3] = odd ? right[1] : second;
}

// Writes rows whose groups of four are aligned. Elements to add to are loaded 16 rows at a time, because loads wait for the stores before
// them.
template <class Out>
__device__ void write_fours(const MmaSums& sums, const GemmTarget<Out>& to, Range rows, Range cols) {
  constexpr unsigned kFours = kWarpCols / 8;
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kWarpRows / 16; ++i) {
    const auto row = [&](unsigned f) { return rows.first + warp_row() + i * 16 + f % 2 * 8 + lane() / 4; };
    const auto col = [&](unsigned f) { return cols.first + warp_col() + f / 2 * 16 + lane() % 2 * 8 + lane() % 4 / 2 * 4; };
    const auto inside = [&](unsigned f) { return row(f) < rows.end && col(f) < cols.end; };
    const auto at = [&](unsigned f) { return to.out + row(f) * to.cols + col(f); };
    Four<Out> before[kFours] = {};
    MANTISSA_UNROLL
    for (unsigned f = 0; f < kFours; ++f) {
      if (to.accumulate && inside(f)) before[f] = load<Four<Out>>(at(f));
    }
    MANTISSA_UNROLL
    for (unsigned f = 0; f < kFours; ++f) {
      float four[4];
      exchange(four, &sums.at[i][f / 2 * 2][f % 2 * 2], &sums.at[i][f / 2 * 2 + 1][f % 2 * 2]);
      MANTISSA_UNROLL
      for (unsigned e = 0; e < 4; ++e) four[e] = to.accumulate ? value_of(before[f].at[e]) + four[e] : four[e];
      if (inside(f)) store(at(f), rounded_four<Out>(four));
    }
  }
}

// Writes rows of any size and place.
template <class Out>
__device__ void write_elements(const MmaSums& sums, const GemmTarget<Out>& to, Range rows, Range cols) {
  MANTISSA_UNROLL
  for (unsigned j = 0; j < kWarpCols / 8 * 2; ++j) {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kWarpRows / 8; ++i) {
      const int64_t row = rows.first + warp_row() + i * 8 + lane() / 4, col = cols.first + warp_col() + j / 2 * 8 + lane() % 4 * 2 + j % 2;
      if (row < rows.end && col < cols.end) to.put(sums.at[i / 2][j / 2][i % 2 * 2 + j % 2], row, col);
    }
  }
}

template <class Out>
__device__ void write_mma(MmaSums& sums, const GemmTarget<Out>& to, Range rows, Range cols) {
  if (to.bias.values) add_bias(sums, to.bias, cols);
  const GemmTarget<Out> rest{to.out, to.cols, to.accumulate};
  const bool aligned = to.cols % 4 == 0 && reinterpret_cast<uintptr_t>(to.out) % sizeof(Four<Out>) == 0;
  aligned ? write_fours(sums, rest, rows, cols) : write_elements(sums, rest, rows, cols);
}

template <class Out, bool kA, bool kB>
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks)
    mma_gemm(MmaSide<kA> a, MmaSide<kB> b, int64_t rows, int64_t depth, GemmTarget<Out> to) {
  auto index = static_cast<unsigned>(block());
  const Range columns{take_last(index, ceil_div(to.cols, int64_t{kMmaCols})) * kMmaCols, to.cols};
  const Range of_tile{int64_t{index} * kMmaRows, rows};
  MmaSums sums;
  add_mma(launched_shared<MmaTiles<kA, kB>>(), a, of_tile, b, columns, {0, depth}, sums);
  write_mma(sums, to, of_tile, columns);
}

// A block has a tile of a group. Like in gemm.cu, the tiles of group g begin at index offsets[g] / kMmaRows + g.
template <class Out, bool kB>
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks)
    grouped_mma(MmaSide<true> a, MmaSide<kB> b, int64_t depth, int64_t matrix_rows, GroupOffsets groups, Out* out, int64_t cols) {
  auto index = static_cast<unsigned>(block());
  const int64_t first_col = take_last(index, ceil_div(cols, int64_t{kMmaCols})) * kMmaCols;
  const auto first_tile = [&](int64_t g) { return groups.begin(g) / kMmaRows + g; };
  const int64_t group = groups.last(index, first_tile);
  const Range rows{groups.begin(group) + (index - first_tile(group)) * kMmaRows, groups.end(group)}, columns{first_col, cols};
  if (rows.first >= rows.end) return;
  b.values += group * matrix_rows * b.row;
  MmaSums sums;
  add_mma(launched_shared<MmaTiles<true, kB>>(), a, rows, b, columns, {0, depth}, sums);
  write_mma(sums, GemmTarget<Out>{out, cols, false}, rows, columns);
}

// A block has a tile of a group's gradient, out_rows x cols.
__global__ void __launch_bounds__(kMmaThreads, kMmaBlocks) grouped_weight_mma(MmaSide<false> a, MmaSide<false> b, GroupOffsets groups,
                                                                              float* out, int64_t out_rows, int64_t cols, bool accumulate) {
  auto index = static_cast<unsigned>(block());
  const int64_t first_col = take_last(index, ceil_div(cols, int64_t{kMmaCols})) * kMmaCols;
  const int64_t first_row = take_last(index, ceil_div(out_rows, int64_t{kMmaRows})) * kMmaRows;
  const int64_t group = index;
  const Range rows{first_row, out_rows}, columns{first_col, cols}, depth{groups.begin(group), groups.end(group)};
  MmaSums sums;
  if (depth.first < depth.end) add_mma(launched_shared<MmaTiles<false, false>>(), a, rows, b, columns, depth, sums);
  write_mma(sums, GemmTarget<float>{out + group * out_rows * cols, cols, accumulate}, rows, columns);
}

template <bool kByDepth>
MmaSide<kByDepth> mma_side(const Tensor& values) {
  return {values.device_data<bf16>(), values.dim(1)};
}

template <bool kA, bool kB>
Grid mma_grid(int64_t tiles) {
  return {tiles, kMmaThreads, sizeof(MmaTiles<kA, kB>)};
}

// Calls body.template operator()<by_depth>().
template <class Body>
void with_order(bool by_depth, Body&& body) {
  by_depth ? body.template operator()<true>() : body.template operator()<false>();
}

}  // namespace

void CudaBackend::multiply_values(const Gemm& k) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1), tiles = ceil_div(rows, int64_t{kMmaRows}) * ceil_div(cols, int64_t{kMmaCols});
  with_values(k.out.dtype(), [&]<class Out>() {
    with_order(!k.a.transposed, [&]<bool kA>() {
      with_order(k.b.transposed, [&]<bool kB>() {
        launch(mma_gemm<Out, kA, kB>, mma_grid<kA, kB>(tiles), mma_side<kA>(k.a.dense()), mma_side<kB>(k.b.dense()), rows, k.a.cols(),
               GemmTarget<Out>{k.out.device_data<Out>(), cols, k.accumulate, bias_of(k)});
      });
    });
  });
}

void CudaBackend::multiply_values(const GroupedGemm& k, const Tensor& a, const Tensor& b, const Tensor& offsets) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const int64_t tiles = rows == 0 ? 0 : (rows / kMmaRows + groups.count) * ceil_div(cols, int64_t{kMmaCols});
  with_values(k.out.dtype(), [&]<class Out>() {
    with_order(k.b.transposed, [&]<bool kB>() {
      launch(grouped_mma<Out, kB>, mma_grid<true, kB>(tiles), mma_side<true>(a), mma_side<kB>(b), a.dim(1), b.dim(0) / groups.count, groups,
             k.out.device_data<Out>(), cols);
    });
  });
}

void CudaBackend::multiply_values(const GroupedWeightGradient& k, const Tensor& a, const Tensor& b, const Tensor& offsets) {
  const int64_t rows = a.dim(1), cols = b.dim(1);
  const GroupOffsets groups = groups_of(offsets);
  const int64_t tiles = groups.count * ceil_div(rows, int64_t{kMmaRows}) * ceil_div(cols, int64_t{kMmaCols});
  launch(grouped_weight_mma, mma_grid<false, false>(tiles), mma_side<false>(a), mma_side<false>(b), groups, k.out.device_data<float>(),
         rows, cols, k.accumulate);
}

}  // namespace mantissa
