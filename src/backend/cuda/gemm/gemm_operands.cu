// Writes operands before a GEMM of the library: codes along its contraction, and scales in its layout.
#include "backend/cuda/codes/codes.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/e8m0.h"

namespace mantissa {
namespace {

using namespace gpu;

constexpr unsigned kSide = 128, kWordsOfSide = kSide / 4;  // rows and columns of a tile that is transposed, and words of them

// Column c of a tile as words of four rows each; word i of it is at (i + c / 4) % kWordsOfSide, so that lanes have different banks.
struct TransposedTile {
  uint32_t words[kSide][kWordsOfSide];
};

// A block has a tile of x [rows, cols]; out is [cols, rows]. in_words: both begin at multiples of four and have such lengths.
__global__ void __launch_bounds__(kThreads) transpose_bytes(const uint8_t* x, uint8_t* out, int64_t rows, int64_t cols, bool in_words) {
  auto& tile = block_shared<TransposedTile>().words;
  const auto across = static_cast<uint32_t>((cols + kSide - 1) / kSide), index = static_cast<uint32_t>(block());
  const int64_t first_row = int64_t{index / across * kSide}, first_col = int64_t{index % across * kSide};
  constexpr unsigned kEach = kWordsOfSide * kWordsOfSide / kThreads;  // squares of 4 x 4 bytes of a thread
  uint32_t in[kEach][4];
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kEach; ++i) {
    const unsigned square = i * kThreads + thread();
    const int64_t row = first_row + square / kWordsOfSide * 4, col = first_col + square % kWordsOfSide * 4;
    MANTISSA_UNROLL
    for (unsigned r = 0; r < 4; ++r) {
      in[i][r] = 0;
      if (row + r >= rows || col >= cols) continue;
      if (in_words) in[i][r] = load<uint32_t>(x + (row + r) * cols + col);
      for (unsigned c = 0; !in_words && c < 4 && col + c < cols; ++c) in[i][r] |= uint32_t{x[(row + r) * cols + col + c]} << (8 * c);
    }
  }
  MANTISSA_UNROLL
  for (unsigned i = 0; i < kEach; ++i) {
    const unsigned square = i * kThreads + thread(), row = square / kWordsOfSide, col = square % kWordsOfSide;
    MANTISSA_UNROLL
    for (unsigned c = 0; c < 4; ++c) {
      uint32_t of_column = 0;
      MANTISSA_UNROLL
      for (unsigned r = 0; r < 4; ++r) of_column |= (in[i][r] >> (8 * c) & 0xffU) << (8 * r);
      tile[col * 4 + c][(row + col) % kWordsOfSide] = of_column;
    }
  }
  barrier();
  for (unsigned i = thread(); i < kSide * kWordsOfSide; i += kThreads) {
    const unsigned c = i / kWordsOfSide;
    const uint32_t word = tile[c][(i % kWordsOfSide + c / 4) % kWordsOfSide];
    const int64_t row = first_row + i % kWordsOfSide * 4, col = first_col + c;
    if (row >= rows || col >= cols) continue;
    if (in_words) store(out + col * rows + row, word);
    for (unsigned r = 0; !in_words && r < 4 && row + r < rows; ++r) out[col * rows + row + r] = static_cast<uint8_t>(word >> (8 * r));
  }
}

// E4M3 codes of four E2M1 codes, whose elements are 0, 1/2 and, from code 2 on, 1 and half a binade more for each: 0, 0x30, 0x38, 0x3c...
// Four bytes at a time, of which none carries into the next.
__device__ inline uint32_t widened(uint32_t four) {
  const uint32_t pairs = (four | four << 8) & 0x00ff00ffU, each = (pairs | pairs << 4) & 0x0f0f0f0fU, magnitudes = each & 0x07070707U;
  const uint32_t from_1 = (magnitudes + 0x07070707U) & 0x08080808U, from_2 = (magnitudes + 0x06060606U) & 0x08080808U;  // 8 or 0
  return from_1 * 6 + ((magnitudes & (from_2 - (from_2 >> 3))) << 2) + ((each & 0x08080808U) << 4);
}
struct alignas(16) SixteenCodes {
  uint32_t words[4];
};
__global__ void __launch_bounds__(kThreads) widen_codes(const uint8_t* x, uint8_t* out, int64_t packs) {
  for_each_element(packs, [=](int64_t i) {
    const auto codes = load<uint64_t>(x + 8 * i);
    SixteenCodes wide;
    MANTISSA_UNROLL
    for (unsigned word = 0; word < 4; ++word) wide.words[word] = widened(static_cast<uint32_t>(codes >> 16 * word) & 0xffffU);
    store(out + 16 * i, wide);
  });
}

// A scale of block j along the contraction, for row i of op(a) or column i of op(b).
struct ScalesOfSide {
  CodeMatrix matrix;
  bool along_rows;  // the contraction goes along the rows of the matrix in memory
  int64_t outer, inner, block;
  __device__ uint8_t at(int64_t i, int64_t j) const { return along_rows ? matrix.scale(i, j * block) : matrix.scale(j * block, i); }
};

__device__ inline float power_of(uint8_t scale) { return __builtin_bit_cast(float, fp32_bits_of_e8m0(scale)); }

__global__ void __launch_bounds__(kThreads) swizzle_scales(ScalesOfSide x, uint8_t* out) {
  const int64_t across = round_up(x.inner, 4);
  for_each_element(round_up(x.outer, 128) * across, [=](int64_t index) {
    const int64_t i = index / across, j = index % across;
    out[swizzled_offset(i, j, x.inner)] = i < x.outer && j < x.inner ? x.at(i, j) : uint8_t{0};
  });
}
__global__ void __launch_bounds__(kThreads) widen_scales(ScalesOfSide x, float* out) {
  for_each_element(x.inner * x.outer, [=](int64_t index) { out[index] = power_of(x.at(index % x.outer, index / x.outer)); });
}
__global__ void __launch_bounds__(kThreads) widen_tiles(ScalesOfSide x, float* out) {
  const int64_t across = round_up(x.inner, 4);
  for_each_element(ceil_div(x.outer, int64_t{128}) * across, [=](int64_t index) {
    const int64_t j = index % across;
    out[index] = j < x.inner ? power_of(x.at(index / across * 128, j)) : 0.0F;
  });
}

struct GroupsToDescribe {
  MatrixOfGroups of[3];
  TablesOfGroups tables;
  const int32_t* offsets;
  int64_t groups;
  float second_factor;
};
__global__ void __launch_bounds__(kThreads) describe_groups(GroupsToDescribe x) {
  for_each_element(x.groups, [=](int64_t group) {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < 3; ++i) {
      const MatrixOfGroups& matrix = x.of[i];
      const int64_t at = i * x.groups + group, first = matrix.of_tokens ? int64_t{x.offsets[group]} : group * matrix.rows;
      x.tables.addresses[at] = matrix.first + first * matrix.row_bytes;
      x.tables.rows[at] = matrix.of_tokens ? x.offsets[group + 1] - x.offsets[group] : matrix.rows;
      x.tables.cols[at] = matrix.cols;
    }
  });
  if (block() == 0 && thread() == 0) x.tables.factors[0] = 1.0F, x.tables.factors[1] = x.second_factor;
}

// Several blocks have the matrix of a group.
constexpr int64_t kBlocksOfGroup = 8;
template <class T>
__global__ void __launch_bounds__(kThreads) clear_group_without_rows(T* out, const int32_t* offsets, int64_t elements) {
  const int64_t group = block() / kBlocksOfGroup;
  if (offsets[group + 1] > offsets[group]) return;
  for (int64_t i = block() % kBlocksOfGroup * kThreads + thread(); i < elements; i += kBlocksOfGroup * kThreads)
    out[group * elements + i] = rounded<T>(0.0F);
}

template <class T>
__global__ void __launch_bounds__(kThreads) clear_where(const int32_t* flag, T* values, int64_t count) {
  if (*flag == 0) return;
  for_each_element(count, [=](int64_t i) { values[i] = rounded<T>(0.0F); });
}

}  // namespace

QuantizedTensor CudaBackend::widened_codes(const QuantizedTensor& x) {
  const Quantization how{Format::e4m3, x.how.block_rows, x.how.block_cols, ScaleRule::rceil, x.how.range};
  const QuantizedTensor out{.codes = empty(*this, Dtype::u8, x.shape), .scales = x.scales, .shape = x.shape, .how = how};
  const int64_t packs = out.codes.elements() / 16;  // native GEMMs have whole blocks of 32
  launch(widen_codes, {blocks_for(packs), kThreads}, x.codes.device_data<uint8_t>(), out.codes.device_data<uint8_t>(), packs);
  return out;
}

void CudaBackend::describe_groups(const std::array<MatrixOfGroups, 3>& matrices, const Tensor& offsets, const TablesOfGroups& tables,
                                  bool accumulate) {
  const int64_t groups = offsets.elements() - 1;
  launch(mantissa::describe_groups, {blocks_for(groups), kThreads},
         GroupsToDescribe{.of = {matrices[0], matrices[1], matrices[2]},
                          .tables = tables,
                          .offsets = offsets.device_data<int32_t>(),
                          .groups = groups,
                          .second_factor = accumulate ? 1.0F : 0.0F});
}

void CudaBackend::clear_groups_without_rows(const Tensor& out, const Tensor& offsets) {
  const int64_t groups = offsets.elements() - 1;
  with_values(out.dtype(), [&]<class T>() {
    launch(clear_group_without_rows<T>, {groups * kBlocksOfGroup, kThreads}, out.device_data<T>(), offsets.device_data<int32_t>(),
           out.elements() / groups);
  });
}

void CudaBackend::transpose(const Tensor& x, const Tensor& out) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const auto *const from = x.device_data<uint8_t>(), *const to = out.device_data<uint8_t>();
  const bool in_words =
      ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) | static_cast<uintptr_t>(rows | cols)) % 4 == 0;
  launch(transpose_bytes, {ceil_div(rows, int64_t{kSide}) * ceil_div(cols, int64_t{kSide}), kThreads}, from, out.device_data<uint8_t>(),
         rows, cols, in_words);
}

void CudaBackend::transpose(const QuantizedTensor& x, const QuantizedTensor& out) {
  transpose(x.codes, out.codes);
  transpose(x.scales, out.scales);
}

void CudaBackend::execute(const SwizzleScales& k) {
  const bool rows = k.x.how.rowwise();
  const ScalesOfSide side{CodeMatrix(k.x), rows, k.x.shape[rows ? 0 : 1], k.x.scales.dim(rows ? 1 : 0), k.x.how.block()};
  launch(swizzle_scales, {blocks_for(k.out.elements()), kThreads}, side, k.out.device_data<uint8_t>());
}

Tensor CudaBackend::scales_of_side(const QuantizedTensor& x, bool along_rows, int64_t block, gpu::ScaleLayout layout) {
  const int64_t outer = x.shape[along_rows ? 0 : 1], inner = x.shape[along_rows ? 1 : 0] / block;
  const ScalesOfSide side{CodeMatrix(x), along_rows, outer, inner, block};
  const auto written = [&](auto* kernel, Dtype dtype, auto none, int64_t elements) {
    const Tensor out = empty(*this, dtype, {elements});
    launch(kernel, {blocks_for(elements), kThreads}, side, out.device_data<decltype(none)>());
    return out;
  };
  if (layout == ScaleLayout::swizzled_e8m0 || layout == ScaleLayout::swizzled_e4m3)
    return written(swizzle_scales, Dtype::u8, uint8_t{}, swizzled_bytes(outer, inner));
  if (layout == ScaleLayout::outer_fp32) return written(widen_scales, Dtype::f32, float{}, inner * outer);
  return written(widen_tiles, Dtype::f32, float{}, ceil_div(outer, int64_t{128}) * round_up(inner, 4));
}

void CudaBackend::clear_where(const Tensor& flag, const Tensor& values) {
  with_values(values.dtype(), [&]<class T>() {
    launch(mantissa::clear_where<T>, {std::min(blocks_for(values.elements()), kFewBlocks), kThreads}, flag.device_data<int32_t>(),
           values.device_data<T>(), values.elements());
  });
}

}  // namespace mantissa
