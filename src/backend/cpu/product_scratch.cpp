#include "mantissa/backend/product_scratch.h"

#include <algorithm>
#include <cmath>

namespace mantissa {
namespace {

// Of a quantised b. A sum is made of whole operands; else gemm.cpp holds a band of whole tiles of columns, and
// grouped_gemm.cpp matrices until they fill one.
double held(const ProductOperands& k, double element) {
  constexpr double kBandBytes = 0x1p23, kTileColumns = 384.0;
  const double matrix = element * k.depth * k.cols, all = static_cast<double>(k.matrices) * matrix;
  if (k.sums) return all;
  if (k.matrices > 1) return std::min(all, std::ceil(kBandBytes / matrix) * matrix);
  const double tile = element * k.depth * kTileColumns;
  return std::min(all, std::max(1.0, std::floor(kBandBytes / tile)) * tile);
}

}  // namespace

double product_scratch(const ProductOperands& k) {
  const bool has_fp32 = k.dtype == Dtype::f32 && (!k.a_quantized || !k.b_quantized);
  const auto element = static_cast<double>(dtype_bytes(has_fp32 ? Dtype::f32 : Dtype::bf16));
  return (k.a_quantized ? element * k.rows * k.depth : 0.0) + (k.b_quantized ? held(k, element) : 0.0);
}

}  // namespace mantissa
