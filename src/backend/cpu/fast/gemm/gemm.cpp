#include <algorithm>
#include <vector>

#include "backend/ceilings.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/gemm/few_rows_gemm.h"
#include "backend/cpu/fast/gemm/gemm_tiles.h"
#include "backend/cpu/gemm_operands.h"
#include "backend/dry_backend.h"
#include "backend/few_rows.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

struct GemmDtypes {
  Dtype tile;         // dtype that is multiplied; dense bf16 operands are widened to it on the way
  Dtype dequantized;  // dtype that quantized operands are decoded to

  // Where scales are extreme (backend.h, Gemm), the error bound of a GEMM relies on subnormals, so it is dequantized to fp32.
  Subnormals subnormals() const { return dequantized == Dtype::bf16 ? Subnormals::flushed : Subnormals::honored; }
};

// Widening bf16 is exact, and so is dequantizing to bf16 unless a scale is extreme: then multiply(GemmDtypes) returns false, and is called
// again for fp32. Both paths multiply the exact values. Returns the number of GEMMs that ran in fp32 where others run in bf16.
template <class Multiply>
int64_t multiply_exactly(const Operand& a, const Operand& b, const Multiply& multiply) {
  const auto fp32 = [](const Operand& operand) { return !operand.quantized() && operand.dense().dtype() == Dtype::f32; };
  const Dtype tile = onednn_has_bf16() && !fp32(a) && !fp32(b) ? Dtype::bf16 : Dtype::f32;
  if (multiply(GemmDtypes{.tile = tile, .dequantized = Dtype::bf16})) return 0;
  multiply(GemmDtypes{.tile = Dtype::f32, .dequantized = Dtype::f32});
  return tile == Dtype::bf16 ? 1 : 0;
}

// Returns the flag of Dequantize for a and b; undefined where nothing is quantized.
Tensor extreme_flag(Backend& device, bool quantized) { return quantized ? zeros(device, Dtype::i32, {1}) : Tensor(); }

// Returns the columns of the output for which a quantized b is dequantized at a time. b is taken whole if the sum accumulates, because it
// cannot start over, and if a is transposed, because a would be packed anew for each column block.
int64_t block_columns(const Gemm& k, Dtype dtype) {
  const auto* b = std::get_if<QuantizedTensor>(&k.b.value);
  if (!b || k.a.transposed || k.accumulate) return k.out.dim(1);
  if (kColumnBlock % (k.b.transposed ? b->how.block_rows : b->how.block_cols) != 0) return k.out.dim(1);
  return std::max<int64_t>(1, kColumnBlockBytes / (k.b.rows() * kColumnBlock * dtype_bytes(dtype))) * kColumnBlock;
}

// Returns columns [first, first + width) of op(b), dequantized; stored as b is. They begin and end with blocks of a quantized b.
Tensor dequantized_columns(const Operand& b, Dtype dtype, int64_t first, int64_t width, const Tensor& extreme) {
  const auto& quantized = std::get<QuantizedTensor>(b.value);
  if (b.transposed) return high_precision(slice(quantized, first, first + width), dtype, extreme);
  Tensor out = empty(quantized.device(), dtype, {quantized.shape[0], width});
  quantized.device().run(Dequantize{.x = quantized, .out = out, .first_col = first, .extreme = extreme});
  return out;
}

}  // namespace

void CpuBackend::execute(const Gemm& k) {
  const int64_t cols = k.out.dim(1);
  const bool fast = k.out.dim(0) > 0 && k.a.cols() > 0;
  // A bf16 sum into a bf16 output would be rounded twice; the reference rounds once.
  if (!fast || (k.accumulate && k.out.dtype() == Dtype::bf16)) return CpuReference::execute(k);
  if (FewRows::allowed(k.a.rows()) && !k.a.transposed && k.b.transposed && !k.accumulate && takes_few_rows(k.b.value)) {
    const Tensor extreme = extreme_flag(*this, k.a.quantized());
    const FewRowsGemm gemm{.a = dense(k.a.value, Dtype::f32, extreme), .b = k.b.value, .out = k.out, .bias = k.bias};
    if (!is_set(extreme) && multiply_few_rows({&gemm, 1})) return;
  }
  fp32_gemms_ += multiply_exactly(k.a, k.b, [&](const GemmDtypes& dtypes) {
    const int64_t step = block_columns(k, dtypes.dequantized);
    const Tensor extreme = extreme_flag(*this, k.a.quantized() || k.b.quantized());
    const Tensor a = dense(k.a.value, dtypes.dequantized, extreme);
    for (int64_t first = 0; first < cols; first += step) {
      const int64_t width = std::min(step, cols - first);
      const Tensor b = width == cols ? dense(k.b.value, dtypes.dequantized, extreme)
                                     : dequantized_columns(k.b, dtypes.dequantized, first, width, extreme);
      if (dtypes.dequantized == Dtype::bf16 && is_set(extreme)) return false;  // with out half written
      const TiledGemm gemm{.a = block(a, k.a.transposed),
                           .b = block(b, k.b.transposed),
                           .out = at(k.out, first),
                           .out_dtype = k.out.dtype(),
                           .out_ld = cols,
                           .accumulate = k.accumulate,
                           .bias = k.bias.defined() ? &k.bias : nullptr,
                           .first_bias = first};
      multiply(dtypes.tile, dtypes.subnormals(), {&gemm, 1});
    }
    return true;
  });
}

int64_t grouped_rows(int64_t rows) { return round_up(rows, tile_shape(Dtype::f32).rows); }

namespace {

// Returns false where a group has too many rows, or needs the care that tiles take.
bool multiply_groups_of_few_rows(const GroupedGemm& k, const Groups& groups, Backend& device) {
  if (!k.b.transposed || !takes_few_rows(k.b.value)) return false;
  for (int64_t g = 0; g < groups.count(); ++g) {
    if (!FewRows::allowed(groups[g].rows())) return false;
  }
  const int64_t stored = shape_of(k.b.value)[0] / groups.count();
  const Tensor extreme = extreme_flag(device, k.a.quantized());
  const Tensor a = dense(slice(k.a.value, 0, groups.end()), Dtype::f32, extreme);
  if (is_set(extreme)) return false;
  std::vector<FewRowsGemm> gemms;
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups[g];
    if (begin == end) continue;
    gemms.push_back({.a = a.slice(begin, end), .b = slice(k.b.value, g * stored, (g + 1) * stored), .out = k.out.slice(begin, end)});
  }
  return gemms.empty() || multiply_few_rows(gemms);
}

}  // namespace

void CpuBackend::execute(const GroupedGemm& k) {
  const int64_t cols = k.out.dim(1);
  if (cols == 0 || k.a.cols() == 0) return CpuReference::execute(k);
  const Groups groups("grouped_gemm", k.offsets, k.out.dim(0));
  const int64_t stored = shape_of(k.b.value)[0] / groups.count();
  if (!multiply_groups_of_few_rows(k, groups, *this)) {
    fp32_gemms_ += multiply_exactly(k.a, k.b, [&](const GemmDtypes& dtypes) {
      const Tensor extreme = extreme_flag(*this, k.a.quantized() || k.b.quantized());
      const Tensor a = dense(slice(k.a.value, 0, groups.end()), dtypes.dequantized, extreme);
      std::vector<Tensor> matrices;
      std::vector<TiledGemm> gemms;
      const auto flush = [&] {
        if (dtypes.dequantized == Dtype::bf16 && is_set(extreme)) return false;  // with out half written
        multiply(dtypes.tile, dtypes.subnormals(), gemms);
        gemms.clear();
        matrices.clear();
        return true;
      };
      for (int64_t g = 0; g < groups.count(); ++g) {
        if (groups[g].rows() == 0) continue;
        matrices.push_back(dense(slice(k.b.value, g * stored, (g + 1) * stored), dtypes.dequantized, extreme));
        gemms.push_back({.a = block(a.slice(groups[g].begin, groups[g].end), false),
                         .b = block(matrices.back(), k.b.transposed),
                         .out = at(k.out, groups[g].begin * cols),
                         .out_dtype = k.out.dtype(),
                         .out_ld = cols,
                         .accumulate = false});
        if (k.b.quantized() && std::ssize(matrices) * matrices.back().bytes() >= kColumnBlockBytes && !flush()) return false;
      }
      return flush();
    });
  }
  run(Fill{.out = k.out.slice(groups.end(), k.out.dim(0)), .value = 0.0});
}

namespace {

int64_t dequantized(const Operand& operand) { return operand.quantized() ? operand.rows() * operand.cols() * dtype_bytes(Dtype::bf16) : 0; }

}  // namespace

// Holds a column block of b, as Gemm does where it does not take b whole.
int64_t gemm_scratch(const Gemm& k) {
  const int64_t a = dequantized(k.a), b = dequantized(k.b);
  if (b == 0 || k.a.transposed || k.accumulate) return a + b;
  const int64_t step = b / k.b.cols() * kColumnBlock;
  return a + std::min(b, std::max<int64_t>(1, kColumnBlockBytes / step) * step);
}

// Holds matrices until they are as large as a column block.
int64_t gemm_scratch(const GroupedGemm& k) {
  const int64_t a = dequantized(k.a), b = dequantized(k.b);
  if (b == 0) return a;
  const int64_t matrix = b / (k.offsets.dim(0) - 1);
  return a + std::min(b, ceil_div(kColumnBlockBytes, matrix) * matrix);
}

int64_t gemm_scratch(const GroupedWeightGradient& k) { return (dequantized({k.a}) + dequantized({k.b})) / (k.offsets.dim(0) - 1); }

}  // namespace mantissa
