#include "mantissa/backend/product_scratch.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/fast/gemm_tiles.h"

namespace mantissa {
namespace {

constexpr double kBf16 = 2.0;  // bytes of an element

// Of a quantized b. A sum is made of whole operands; else gemm.cpp holds a band of columns, and grouped_gemm.cpp matrices until they are as
// large as one.
double held(const ProductOperands& k) {
  constexpr auto kBand = static_cast<double>(kBandBytes);
  const double matrix = kBf16 * k.depth * k.cols, all = static_cast<double>(k.matrices) * matrix;
  if (k.sums) return all;
  if (k.matrices > 1) return std::min(all, std::ceil(kBand / matrix) * matrix);
  const double step = kBf16 * k.depth * static_cast<double>(kBandColumns);
  return std::min(all, std::max(1.0, std::floor(kBand / step)) * step);
}

}  // namespace

double product_scratch(const ProductOperands& k) {
  return (k.a_quantized ? kBf16 * k.rows * k.depth : 0.0) + (k.b_quantized ? held(k) : 0.0);
}

}  // namespace mantissa
