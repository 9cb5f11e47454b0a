#include <algorithm>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/few_rows_gemm.h"
#include "backend/cpu/fast/gemm_engine.h"
#include "backend/cpu/fast/gemm_tiles.h"
#include "backend/cpu/widened_gemm.h"
#include "mantissa/backend/few_rows.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/cpu_level.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"

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

}  // namespace mantissa
