// Products of any shape out of tiles of one shape (packed_product.h). What is cut where depends on the order of work only: no bit depends
// on it.
#pragma once

#include <span>

#include "backend/cpu/packed_product.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/parallel.h"

namespace mantissa {

// out [a.rows, b.cols] = a * b + bias, rounded once; if `accumulate`, added to what an fp32 out holds.
struct TiledProduct {
  Block a, b;
  std::byte* out;
  Dtype out_dtype;
  int64_t out_ld;
  bool accumulate;
  const Tensor* bias = nullptr;  // [b.cols] from first_bias on, fp32 or bf16
  int64_t first_bias = 0;
};

// All of them, one after the other or at once. Packed parts of b take up to 8 MiB of memory that the calling thread keeps, those of a and
// // the sums about 0.6 MiB in each thread.
void multiply(Dtype dtype, Subnormals subnormals, std::span<const TiledProduct> products);

// The matrix op(value).
Block block(const Tensor& tensor, bool transposed);

// Dequantised to `dtype` with `extreme` as in Dequantize, or as it is: packing widens.
Tensor dense(const Value& value, Dtype dtype, const Tensor& extreme);

// Where scales are extreme (backend.h, Gemm), subnormals count: the product's bound relies on them. `extreme` is undefined where nothing is
// quantised.
Subnormals subnormals_of(const Tensor& extreme);

inline bool is_fp32(const Operand& operand) { return !operand.quantized() && operand.dense().dtype() == Dtype::f32; }

inline std::byte* at(const Tensor& tensor, int64_t element) { return tensor.device_bytes() + element * dtype_bytes(tensor.dtype()); }

}  // namespace mantissa
