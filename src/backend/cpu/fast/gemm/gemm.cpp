#include <algorithm>
#include <vector>

#include "backend/ceilings.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/gemm/few_rows_gemm.h"
#include "backend/cpu/fast/gemm/gemm_engine.h"
#include "backend/cpu/fast/gemm/gemm_tiles.h"
#include "backend/cpu/groups.h"
#include "backend/cpu/widened_gemm.h"
#include "backend/few_rows.h"
#include "backend/gemm_scratch.h"
#include "base/cpu_level.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

// Returns the columns of the output for which a quantized b is dequantized at a time. b is taken whole if the sum accumulates, because it
// cannot start over, and if a is transposed, because a would be packed anew for each column block.
int64_t block_columns(const Gemm& k, Dtype dtype) {
  const auto* b = std::get_if<QuantizedTensor>(&k.b.value);
  if (!b || k.a.transposed || k.accumulate) return k.out.dim(1);
  if (kColumnBlock % (k.b.transposed ? b->how.block_rows : b->how.block_cols) != 0) return k.out.dim(1);
  return std::max<int64_t>(1, kColumnBlockBytes / (k.b.rows() * kColumnBlock * dtype_bytes(dtype))) * kColumnBlock;
}

}  // namespace

// Returns false if FewRows does not allow this GEMM, or if it needs the care that tiles take.
bool GemmEngine::run_few_rows(const Gemm& k, Backend& device) {
  if (!FewRows::allowed(k.a.rows()) || k.a.transposed || !k.b.transposed || k.accumulate || !takes_few_rows(k.b.value)) return false;
  const Tensor extreme = k.a.quantized() ? zeros(device, Dtype::i32, {1}) : Tensor();
  const FewRowsGemm gemm{.a = dense(k.a.value, Dtype::f32, extreme), .b = k.b.value, .out = k.out, .bias = k.bias};
  return !is_set(extreme) && multiply_few_rows({&gemm, 1});
}

// Returns false, with out half written, if a dequantized operand is not exact in bf16.
bool GemmEngine::run_column_blocks(const Gemm& k, const GemmDtypes& dtypes, Backend& device) {
  const int64_t cols = k.out.dim(1), step = block_columns(k, dtypes.dequantized);
  if (k.a.rows() == 0 || cols == 0) return true;
  const Tensor extreme = k.a.quantized() || k.b.quantized() ? zeros(device, Dtype::i32, {1}) : Tensor();
  const Tensor a = dense(k.a.value, dtypes.dequantized, extreme);
  for (int64_t first = 0; first < cols; first += step) {
    const int64_t width = std::min(step, cols - first);
    const Tensor b =
        width == cols ? dense(k.b.value, dtypes.dequantized, extreme) : dequantized_columns(k.b, dtypes.dequantized, first, width, extreme);
    if (dtypes.dequantized == Dtype::bf16 && is_set(extreme)) return false;
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
}

void GemmEngine::run(const Gemm& k, Backend& device) {
  if (run_few_rows(k, device)) return;
  run_exactly(is_fp32(k.a) || is_fp32(k.b), [&](const GemmDtypes& dtypes) { return run_column_blocks(k, dtypes, device); });
}

CpuBackend::CpuBackend() : gemm_(std::make_unique<GemmEngine>()) {
  cpu_level();  // a wrong MANTISSA_MAX_CPU_LEVEL is an error here and not of the first kernel
}
CpuBackend::~CpuBackend() = default;

int64_t CpuBackend::fp32_gemms() const { return gemm_->fp32_gemms(); }

void CpuBackend::execute(const Gemm& k) {
  const bool fast = k.out.dim(0) > 0 && k.a.cols() > 0;
  // A bf16 sum into a bf16 output would be rounded twice; the reference rounds once.
  if (!fast || (k.accumulate && k.out.dtype() == Dtype::bf16)) return CpuReference::execute(k);
  gemm_->run(k, *this);
}

int64_t grouped_rows(int64_t rows) { return round_up(rows, tile_shape(Dtype::f32).rows); }

// Runs each group as a GEMM of its own. Returns false, with out half written, if a dequantized operand is not exact in bf16.
bool GemmEngine::run_groups(const GroupedGemm& k, const GemmDtypes& dtypes, Backend& device) {
  const Groups groups("grouped_gemm", k.offsets, k.out.dim(0));
  const int64_t stored = shape_of(k.b.value)[0] / groups.count(), cols = k.out.dim(1);
  const Tensor extreme = k.a.quantized() || k.b.quantized() ? zeros(device, Dtype::i32, {1}) : Tensor();
  const Tensor a = dense(slice(k.a.value, 0, groups.end()), dtypes.dequantized, extreme);
  std::vector<Tensor> matrices;
  std::vector<TiledGemm> gemms;
  const auto flush = [&] {
    if (dtypes.dequantized == Dtype::bf16 && is_set(extreme)) return false;
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
  if (!flush()) return false;
  device.run(Fill{.out = k.out.slice(groups.end(), k.out.dim(0)), .value = 0.0});
  return true;
}

// Returns false where a group has too many rows, or needs the care that tiles take.
bool GemmEngine::run_few_rows(const GroupedGemm& k, Backend& device) {
  const Groups groups("grouped_gemm", k.offsets, k.out.dim(0));
  const int64_t stored = shape_of(k.b.value)[0] / groups.count();
  if (!k.b.transposed || !takes_few_rows(k.b.value)) return false;
  for (int64_t g = 0; g < groups.count(); ++g) {
    if (!FewRows::allowed(groups[g].rows())) return false;
  }
  const Tensor extreme = k.a.quantized() ? zeros(device, Dtype::i32, {1}) : Tensor();
  const Tensor a = dense(slice(k.a.value, 0, groups.end()), Dtype::f32, extreme);
  if (is_set(extreme)) return false;
  std::vector<FewRowsGemm> gemms;
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups[g];
    if (begin == end) continue;
    gemms.push_back({.a = a.slice(begin, end), .b = slice(k.b.value, g * stored, (g + 1) * stored), .out = k.out.slice(begin, end)});
  }
  if (!gemms.empty() && !multiply_few_rows(gemms)) return false;
  device.run(Fill{.out = k.out.slice(groups.end(), k.out.dim(0)), .value = 0.0});
  return true;
}

void GemmEngine::run(const GroupedGemm& k, Backend& device) {
  if (run_few_rows(k, device)) return;
  run_exactly(is_fp32(k.a) || is_fp32(k.b), [&](const GemmDtypes& dtypes) { return run_groups(k, dtypes, device); });
}

void CpuBackend::execute(const GroupedGemm& k) {
  if (k.out.dim(1) == 0 || k.a.cols() == 0) return CpuReference::execute(k);
  gemm_->run(k, *this);
}

namespace {

int64_t dequantized(const Operand& operand) { return operand.quantized() ? operand.rows() * operand.cols() * dtype_bytes(Dtype::bf16) : 0; }

}  // namespace

// Holds a column block of b, as run_column_blocks() does where it does not take b whole.
int64_t gemm_scratch(const Gemm& k) {
  const int64_t a = dequantized(k.a), b = dequantized(k.b);
  if (b == 0 || k.a.transposed || k.accumulate) return a + b;
  const int64_t step = b / k.b.cols() * kColumnBlock;
  return a + std::min(b, std::max<int64_t>(1, kColumnBlockBytes / step) * step);
}

// Holds matrices until they are as large as a column block, as run_column_blocks() does.
int64_t gemm_scratch(const GroupedGemm& k) {
  const int64_t a = dequantized(k.a), b = dequantized(k.b);
  if (b == 0) return a;
  const int64_t matrix = b / (k.offsets.dim(0) - 1);
  return a + std::min(b, ceil_div(kColumnBlockBytes, matrix) * matrix);
}

int64_t gemm_scratch(const GroupedWeightGradient& k) { return (dequantized({k.a}) + dequantized({k.b})) / (k.offsets.dim(0) - 1); }

}  // namespace mantissa
