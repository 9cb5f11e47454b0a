#include "backend/gemm_scratch.h"

#include <algorithm>

#include "backend/cpu/fast/gemm_tiles.h"

namespace mantissa {
namespace {

int64_t dequantized(const Operand& operand) { return operand.quantized() ? operand.rows() * operand.cols() * dtype_bytes(Dtype::bf16) : 0; }

}  // namespace

// Holds a column block of b, as gemm.cpp does where it does not take b whole.
int64_t gemm_scratch(const Gemm& k) {
  const int64_t a = dequantized(k.a), b = dequantized(k.b);
  if (b == 0 || k.a.transposed || k.accumulate) return a + b;
  const int64_t step = b / k.b.cols() * kColumnBlock;
  return a + std::min(b, std::max<int64_t>(1, kColumnBlockBytes / step) * step);
}

// Holds matrices until they are as large as a column block, as grouped_gemm.cpp does.
int64_t gemm_scratch(const GroupedGemm& k) {
  const int64_t a = dequantized(k.a), b = dequantized(k.b);
  if (b == 0) return a;
  const int64_t matrix = b / (k.offsets.dim(0) - 1);
  return a + std::min(b, ceil_div(kColumnBlockBytes, matrix) * matrix);
}

int64_t gemm_scratch(const GroupedWeightGradient& k) { return (dequantized({k.a}) + dequantized({k.b})) / (k.offsets.dim(0) - 1); }

}  // namespace mantissa
