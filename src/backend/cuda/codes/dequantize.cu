// Codes as values.
#include <bit>

#include "backend/cuda/codes/codes.h"
#include "backend/cuda/cuda_backend.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// Blocks whose sides are 2^shift elements. kRows rows that a thread has lie in one of them, or in as many where blocks are rows.
struct ShiftedBlocks {
  static constexpr unsigned kRows = 8;
  unsigned row_shift, col_shift;
  uint32_t step;  // distance of the scale of a row from that of the next
};

template <class E, class T>
__device__ void write_exactly(const CodesToRead<E>& x, int64_t row, int64_t col, T* to, bool& extreme) {
  *to = rounded<T>(__builtin_bit_cast(float, x.bits(row, col)));
  extreme = extreme || ((x.code(row, col) & E::magnitude_mask) != 0 && extreme_scale<E>(x.scale(row, col)));
}

__device__ inline void report_extreme(int32_t* flag, bool found) {
  if (flag != nullptr && found) fetch_or(reinterpret_cast<uint32_t*>(flag), 1U);
}

// out [rows, cols] is the columns of x from `first_col` on. A thread has a pack of each row of a blocks.
template <class E, bool kColumns, class T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 2)
    dequantize(CodesToRead<E> x, ShiftedBlocks blocks, int64_t first_col, T* out, int64_t rows, int64_t cols, int32_t* extreme) {
  constexpr unsigned kRows = ShiftedBlocks::kRows;
  const auto across = static_cast<uint32_t>(cols / kPack);
  const float zero =
      x.rule.scale == ScaleRule::flashinfer ? 0.0F : -0.0F;  // under flashinfer -0 becomes 0, else adding this changes nothing
  bool found = false;
  for_each_element((rows + kRows - 1) / kRows * across, [&](int64_t index) {
    const int64_t row = int64_t{static_cast<uint32_t>(index) / across} * kRows,
                  col = int64_t{static_cast<uint32_t>(index) % across} * kPack;
    const int64_t from = first_col + col;
    const int count = static_cast<int>(rows - row < kRows ? rows - row : kRows);
    using Scales = std::conditional_t<kColumns, PackOfCodes<E4M3>, uint8_t>;  // bytes
    const RowsOfThread<const uint8_t> in{x.codes + (row * x.cols + from) / E::codes_per_byte,
                                         static_cast<uint32_t>(x.cols / E::codes_per_byte), count};
    const RowsOfThread<const uint8_t> of_rows{x.scales + (row >> blocks.row_shift) * x.blocks_across + (from >> blocks.col_shift),
                                              blocks.step, count};
    const RowsOfThread<PackInMemory<T>> to{reinterpret_cast<PackInMemory<T>*>(out + row * cols + col), across, count};
    PackOfCodes<E> codes[kRows];
    Scales scales[kRows];
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kRows; ++i) {
      codes[i] = in.has(i) ? load<PackOfCodes<E>>(in[i]) : PackOfCodes<E>{};
      if constexpr (kColumns)
        scales[i] = i > 0 ? scales[0] : load<Scales>(of_rows[0]);
      else
        scales[i] = in.has(i) ? *of_rows[i] : 127;
    }
    PackInMemory<T> packs[kRows];
    uint32_t nonfinite = 0, extremest = 0;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kRows; ++i) {
      Pack pack = elements_of(codes[i]);
      nonfinite |= nonfinite_bits(codes[i]);
      MANTISSA_UNROLL
      for (unsigned c = 0; c < kPack; ++c) {
        uint32_t scale = 0;
        if constexpr (kColumns)
          scale = scales[i].at(c);
        else
          scale = scales[i];
        extremest = Largest<uint32_t>()(extremest, (E::two_levels ? scale & E4M3::magnitude_mask : scale) - kLeastScale<E>);
        if constexpr (E::two_levels)
          pack.at[c] *= number_of_nvfp4(scale, x.rule.tensor_exponent);
        else
          pack.at[c] *= __builtin_bit_cast(float, scale << 23);  // not of scales that are extreme
        if constexpr (std::is_same_v<E, E2M1>) pack.at[c] += zero;
      }
      if constexpr (std::is_same_v<T, bf16>) {
        MANTISSA_UNROLL
        for (unsigned c = 0; c < kPack; c += 2) packs[i].words[c / 2] = pack_bf16(pack.at[c], pack.at[c + 1]);
      } else {
        MANTISSA_UNROLL
        for (unsigned c = 0; c < kPack; ++c) packs[i].at[c] = pack.at[c];
      }
    }
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kRows; ++i) {
      if (to.has(i)) store(to[i], packs[i]);
    }
    if (nonfinite == 0 && extremest <= kMostScale<E> - kLeastScale<E>) return;
    for (unsigned i = 0; to.has(i); ++i) {
      for (unsigned c = 0; c < kPack; ++c) write_exactly(x, row + i, from + c, reinterpret_cast<T*>(to[i]) + c, found);
    }
  });
  report_extreme(extreme, found);
}

// Any blocks.
template <class E, class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_each(CodesToRead<E> x, int64_t first_col, T* out, int64_t rows, int64_t cols, int32_t* extreme) {
  bool found = false;
  for_each_element(rows * cols, [&](int64_t i) { write_exactly(x, i / cols, first_col + i % cols, out + i, found); });
  report_extreme(extreme, found);
}

}  // namespace

void CudaBackend::execute(const Dequantize& k) {
  const int64_t rows = k.out.dim(0), cols = k.out.dim(1), down = k.x.how.block_rows, along = k.x.how.block_cols;
  const auto power = [](int64_t length) { return std::has_single_bit(static_cast<uint64_t>(length)); };
  const auto shift = [](int64_t length) { return static_cast<unsigned>(std::countr_zero(static_cast<uint64_t>(length))); };
  const bool columns = along == 1 && down > 1;
  const ShiftedBlocks blocks{shift(down), shift(along), down == 1 ? static_cast<uint32_t>(k.x.scales.dim(1)) : 0};
  const bool in_packs = cols % kPack == 0 && k.x.shape[1] % kPack == 0 && k.x.shape[1] <= kMostCols && k.first_col % kPack == 0 &&
                        power(down) && power(along) && (down == 1 || down % ShiftedBlocks::kRows == 0) && (columns || along % kPack == 0) &&
                        begins_at(k.x.codes.device_bytes(), kPack) && (!columns || begins_at(k.x.scales.device_bytes(), kPack)) &&
                        begins_at(k.out.device_bytes(), 16);
  with_any_element(k.x.how.format, [&]<class E>() {
    with_values(k.out.dtype(), [&]<class T>() {
      const CodesToRead<E> x(k.x);
      T* const out = k.out.device_data<T>();
      int32_t* const extreme = data_or_null<int32_t>(k.extreme);
      if (in_packs) {
        const auto kernel = columns ? dequantize<E, !E::two_levels, T> : dequantize<E, false, T>;
        return launch(kernel, {blocks_for(ceil_div(rows, int64_t{ShiftedBlocks::kRows}) * cols / kPack), kThreads}, x, blocks, k.first_col,
                      out, rows, cols, extreme);
      }
      launch(dequantize_each<E, T>, {blocks_for(rows * cols), kThreads}, x, k.first_col, out, rows, cols, extreme);
    });
  });
}

void CudaBackend::execute(const FakeQuantize& k) { execute(Dequantize{.x = quantized(k.x, k.how), .out = k.out}); }

}  // namespace mantissa
