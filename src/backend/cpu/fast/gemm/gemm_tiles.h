// Builds GEMMs of any shape from tiles (packed_gemm.h). The cuts decide the order of work only: no bit depends on them.
#pragma once

#include <span>

#include "backend/cpu/fast/gemm/packed_gemm.h"
#include "base/parallel.h"
#include "mantissa/backend/backend.h"

namespace mantissa {

// out [a.rows, b.cols] = a * b + bias, rounded once; if `accumulate`, added to what an fp32 out holds.
struct TiledGemm {
  Block a, b;
  std::byte* out;
  Dtype out_dtype;
  int64_t out_ld;
  bool accumulate;
  const Tensor* bias = nullptr;  // [b.cols] from first_bias on, fp32 or bf16
  int64_t first_bias = 0;
};

// Runs all of them, in any order; each element is a sum in the order of the depth. Each thread keeps up to about 1.4 MiB for packed
// operands and sums, the caller 8 MiB for operands that are packed for all threads.
void multiply(Dtype dtype, Subnormals subnormals, std::span<const TiledGemm> gemms);

// Returns the matrix op(value).
Block block(const Tensor& tensor, bool transposed);

// Dequantizes to `dtype`, with `extreme` as in Dequantize; returns a dense operand as it is, because packing widens.
Tensor dense(const Value& value, Dtype dtype, const Tensor& extreme);

// Returns whether a block with an extreme scale (backend.h, Gemm) was seen. `extreme` is undefined where nothing is quantized.
bool is_set(const Tensor& extreme);

// A large quantized b is dequantized in about so many bytes at a time, in steps of so many columns, a multiple of every tile and block.
inline constexpr int64_t kColumnBlockBytes = int64_t{1} << 23, kColumnBlock = 768;

// Writes the bias of columns [first, first + cols) to `to`, or zeros if it is null.
void load_bias(const Tensor* bias, int64_t first, int64_t cols, float* to);

inline std::byte* at(const Tensor& tensor, int64_t element) { return tensor.device_bytes() + element * dtype_bytes(tensor.dtype()); }

}  // namespace mantissa
