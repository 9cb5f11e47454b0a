#include "mantissa/backend/gemm_scratch.h"

#include <algorithm>
#include <cmath>

#include "backend/cpu/fast/gemm_tiles.h"

namespace mantissa {
namespace {

constexpr double kBf16 = 2.0;  // bytes of an element

// Counts a quantized b. Accumulation takes whole operands; else gemm.cpp holds a column block, and grouped_gemm.cpp matrices until they are
// as large as one.
double held(const GemmSizes& k) {
  constexpr auto kRowBlock = static_cast<double>(kColumnBlockBytes);
  const double matrix = kBf16 * k.depth * k.cols, all = static_cast<double>(k.matrices) * matrix;
  if (k.sums) return all;
  if (k.matrices > 1) return std::min(all, std::ceil(kRowBlock / matrix) * matrix);
  const double step = kBf16 * k.depth * static_cast<double>(kColumnBlock);
  return std::min(all, std::max(1.0, std::floor(kRowBlock / step)) * step);
}

}  // namespace

double gemm_scratch(const GemmSizes& k) { return (k.a_quantized ? kBf16 * k.rows * k.depth : 0.0) + (k.b_quantized ? held(k) : 0.0); }

}  // namespace mantissa
