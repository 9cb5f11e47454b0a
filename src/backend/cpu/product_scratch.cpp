#include "mantissa/backend/product_scratch.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/gemm_engine.h"

namespace mantissa {
namespace {

// Of b that is not as the product needs it. A sum is made of whole operands; else gemm.cpp holds a band of whole tiles of columns, and
// grouped_gemm.cpp matrices until they fill one.
double held(const ProductOperands& k, double element) {
  constexpr double kBandBytes = 0x1p23, kTileColumns = 384.0;
  const double matrix = element * k.depth * k.cols, all = static_cast<double>(k.matrices) * matrix;
  if (k.sums || (k.matrices == 1 && !k.b_quantized)) return all;
  if (k.matrices > 1) return std::min(all, std::ceil(kBandBytes / matrix) * matrix);
  const double tile = element * k.depth * kTileColumns;
  return std::min(all, std::max(1.0, std::floor(kBandBytes / tile)) * tile);
}

}  // namespace

double product_scratch(const ProductOperands& k) {
  const bool has_fp32 = k.dtype == Dtype::f32 && (!k.a_quantized || !k.b_quantized);
  const Dtype wide = has_fp32 || !onednn_has_bf16() ? Dtype::f32 : Dtype::bf16;
  const auto element = static_cast<double>(dtype_bytes(wide));
  double bytes = 0.0;
  if (k.a_quantized || k.dtype != wide) bytes += element * k.rows * k.depth;
  if (k.b_quantized || k.dtype != wide) bytes += held(k, element);
  if (!k.sums && k.dtype == Dtype::bf16 && wide == Dtype::f32) bytes += element * k.rows * k.cols;
  return bytes;
}

}  // namespace mantissa
