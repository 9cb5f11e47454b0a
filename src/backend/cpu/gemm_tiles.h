// What products of one matrix and of groups have in common: how columns are cut, and which operands need fp32.
#pragma once

#include <algorithm>

#include "mantissa/backend/backend.h"

namespace mantissa {

// Columns of a tile. 384 keep the library's copy of b in the L2 cache; a deep transposed b is copied in long strides, which 768 columns
// amortise.
inline int64_t tile_columns(int64_t cols, int64_t depth, bool b_transposed) {
  return std::min<int64_t>(cols, b_transposed && depth >= 2048 ? 768 : 384);
}

inline std::byte* at(const Tensor& tensor, int64_t element) { return tensor.device_bytes() + element * dtype_bytes(tensor.dtype()); }

inline bool is_set(const Tensor& flag) { return *flag.device_data<int32_t>() != 0; }

inline bool is_fp32(const Tensor& tensor) { return tensor.defined() && tensor.dtype() == Dtype::f32; }
inline bool is_fp32(const Operand& operand) { return !operand.quantized() && is_fp32(operand.dense()); }

}  // namespace mantissa
