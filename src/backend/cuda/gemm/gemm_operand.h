// Operands of GEMMs as sides of tile products: values, or codes that are decoded as they are loaded. Decoded to fp32 they are exact at
// every scale.
#pragma once

#include "backend/cuda/codes/codes.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/tile_product.h"

namespace mantissa::gpu {

// All blocks of a kernel call it once; the first one counts the kernel.
__device__ inline bool is_up(OnlyIf only_if) {
  if (only_if.flag == nullptr) return true;
  if (*only_if.flag == 0) return false;
  if (block() == 0 && thread() == 0) fetch_add(only_if.fp32_gemms, 1U);
  return true;
}

// A matrix as it lies in memory, from first_row on.
struct GemmMatrix {
  const void* values = nullptr;  // null: codes
  Dtype dtype = Dtype::f32;      // dtype of values
  int64_t cols = 0;              // columns of values
  Format format = Format::none;  // format of codes
  CodeMatrix codes{};
  int64_t first_row = 0;
};

inline GemmMatrix gemm_matrix(const Value& value) {
  if (const auto* codes = std::get_if<QuantizedTensor>(&value)) return {.format = codes->how.format, .codes = CodeMatrix(*codes)};
  const Tensor& dense = std::get<Tensor>(value);
  require(dense.dtype() == Dtype::f32 || dense.dtype() == Dtype::bf16, "gemm on CUDA: an operand without codes must be fp32 or bf16, got ",
          dense.dtype());
  return {.values = dense.device_bytes(), .dtype = dense.dtype(), .cols = dense.dim(1)};
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
  if (matrix.values) {
    const auto read = [&](const auto* x) {
      return [&matrix, first, x](int64_t r, int64_t c) { return value_of(x[(first + r) * matrix.cols + c]); };
    };
    return matrix.dtype == Dtype::f32 ? body(read(static_cast<const float*>(matrix.values)))
                                      : body(read(static_cast<const bf16*>(matrix.values)));
  }
  const auto decode = [&]<class E>(CodesToRead<E> codes) {
    body([codes, first](int64_t r, int64_t c) { return __builtin_bit_cast(float, codes.bits(first + r, c)); });
  };
  if (matrix.format == Format::e4m3) return decode(CodesToRead<E4M3>(matrix.codes));
  if (matrix.format == Format::e5m2) return decode(CodesToRead<E5M2>(matrix.codes));
  if (matrix.format == Format::nvfp4) return decode(CodesToRead<Nvfp4>(matrix.codes));
  decode(CodesToRead<E2M1>(matrix.codes));
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

inline GemmBias bias_of(const Gemm& k) {
  return k.bias.defined() ? GemmBias{k.bias.device_bytes(), k.bias.dtype() == Dtype::bf16} : GemmBias{};
}

// The output of a product. The rows and columns that a block writes begin with those of its tile and end with the product.
template <class Out>
struct GemmTarget {
  Out* out;
  int64_t cols;
  bool accumulate;
  GemmBias bias{};

  __device__ void put(float sum, int64_t row, int64_t column) const {
    const float value = bias.values ? sum + bias[column] : sum;
    Out& to = out[row * cols + column];
    to = rounded<Out>(accumulate ? value_of(to) + value : value);
  }
  __device__ void write(const Sums& sums, Range rows, Range columns) const {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kEach; ++i) {
      const int64_t row = rows.first + first_row() + i;
      MANTISSA_UNROLL
      for (unsigned j = 0; j < kEach; ++j) {
        const int64_t column = columns.first + first_col() + j;
        if (row < rows.end && column < columns.end) put(sums.at[i][j], row, column);
      }
    }
  }
};

}  // namespace mantissa::gpu
