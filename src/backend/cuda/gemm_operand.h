// Operands of GEMMs as sides of tile products: values, or codes that are decoded as they are loaded. Decoded to fp32 they are exact at
// every scale.
#pragma once

#include "backend/cuda/tile_product.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa::gpu {

// A matrix as it lies in memory, from first_row on.
struct GemmMatrix {
  const void* values;  // or codes
  const uint8_t* scales = nullptr;
  Dtype dtype = Dtype::u8;  // u8: codes
  Format format = Format::none;
  ScaleRule rule = ScaleRule::rceil;
  unsigned block_rows = 1, block_cols = 1;
  int64_t cols = 0;
  int64_t first_row = 0;
};

inline GemmMatrix gemm_matrix(const Value& value) {
  const auto* codes = std::get_if<QuantizedTensor>(&value);
  if (!codes) {
    const Tensor& dense = std::get<Tensor>(value);
    require(dense.dtype() == Dtype::f32 || dense.dtype() == Dtype::bf16, "the CUDA backend multiplies no ", dense.dtype());
    return {.values = dense.device_bytes(), .dtype = dense.dtype(), .cols = dense.dim(1)};
  }
  return {.values = codes->codes.device_bytes(),
          .scales = codes->scales.device_data<uint8_t>(),
          .format = codes->how.format,
          .rule = codes->how.rule,
          .block_rows = static_cast<unsigned>(codes->how.block_rows),
          .block_cols = static_cast<unsigned>(codes->how.block_cols),
          .cols = codes->shape[1]};
}

template <class E>
__device__ inline float decoded(const GemmMatrix& matrix, int64_t row, int64_t col) {
  const auto* codes = static_cast<const uint8_t*>(matrix.values);
  const int64_t index = row * matrix.cols + col;
  const uint8_t byte = codes[index / E::codes_per_byte];
  const uint8_t code = E::codes_per_byte == 1 ? byte : static_cast<uint8_t>(byte >> (4 * (col % 2)) & 0xF);
  const auto r = static_cast<unsigned>(row), c = static_cast<unsigned>(col), across = static_cast<unsigned>(matrix.cols);
  const uint8_t scale = matrix.scales[int64_t{r / matrix.block_rows} * (across / matrix.block_cols) + c / matrix.block_cols];
  return __builtin_bit_cast(float, decode_in_block<E>(code, scale, matrix.rule));
}

// Rows of op(a), or columns of op(b), in a range.
struct GemmSide {
  GemmMatrix matrix;
  bool by_depth;  // its memory is contiguous along the depth
  Range outer;
};

// Calls body(read), read(row, column) being the matrix.
template <class Body>
__device__ inline void with_read(const GemmMatrix& matrix, Body body) {
  const int64_t first = matrix.first_row;
  if (matrix.dtype != Dtype::u8) {
    const auto read = [&](const auto* x) {
      return [&matrix, first, x](int64_t r, int64_t c) { return value_of(x[(first + r) * matrix.cols + c]); };
    };
    return matrix.dtype == Dtype::f32 ? body(read(static_cast<const float*>(matrix.values)))
                                      : body(read(static_cast<const bf16*>(matrix.values)));
  }
  if (matrix.format == Format::e4m3) return body([&](int64_t r, int64_t c) { return decoded<E4M3>(matrix, first + r, c); });
  if (matrix.format == Format::e5m2) return body([&](int64_t r, int64_t c) { return decoded<E5M2>(matrix, first + r, c); });
  body([&](int64_t r, int64_t c) { return decoded<E2M1>(matrix, first + r, c); });
}

__device__ inline void load_tile(Tile& tile, const GemmSide& side, Range depth) {
  with_read(side.matrix, [&](auto read) {
    if (side.by_depth) return load_values(tile, side.outer, depth, true, read);
    load_values(tile, side.outer, depth, false, [&](int64_t outer, int64_t k) { return read(k, outer); });
  });
}

struct GemmBias {  // none where values is null
  const void* values = nullptr;
  bool narrow = false;  // bf16

  __device__ float operator[](int64_t column) const {
    return narrow ? value_of(static_cast<const bf16*>(values)[column]) : static_cast<const float*>(values)[column];
  }
};

// Where a product goes, of which rows and columns begin at those of a tile and end with the product.
template <class Out>
struct GemmTarget {
  Out* out;
  int64_t cols;
  bool accumulate;
  GemmBias bias{};

  __device__ void write(const Sums& sums, Range rows, Range columns) const {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      const int64_t row = rows.first + first_row() + i;
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const int64_t column = columns.first + first_col() + j;
        if (row >= rows.end || column >= columns.end) continue;
        const float sum = bias.values ? sums.at[i][j] + bias[column] : sums.at[i][j];
        Out& to = out[row * cols + column];
        to = rounded<Out>(accumulate ? value_of(to) + sum : sum);
      }
    }
  }
};

}  // namespace mantissa::gpu
