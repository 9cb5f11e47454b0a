#include <algorithm>

#include "backend/cpu/fast/cpu_backend.h"
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

constexpr int64_t kFewRows = 16;  // few_rows.h

// The columns of b in one call for a few rows: their part of b stays in the second-level cache.
constexpr int64_t kFewRowsColumns = 384;

bool has_few_rows(const Gemm& k, Dtype dtype) {
  const bool as_they_are = (k.a.quantized() || k.a.dense().dtype() == dtype) && (k.b.quantized() || k.b.dense().dtype() == dtype);
  return FewRows::allowed() && k.a.rows() <= kFewRows && !k.a.transposed && as_they_are && (!k.bias.defined() || k.bias.dtype() == dtype) &&
         (k.out.dtype() == dtype || k.out.dtype() == Dtype::f32);
}

// Returns the columns of the output for which a quantized b is dequantized at a time. b is taken whole if the sum accumulates, because it
// cannot start over, and if a is transposed, because a would be packed anew for each column block.
int64_t block_columns(const Gemm& k, Dtype dtype) {
  const auto* b = std::get_if<QuantizedTensor>(&k.b.value);
  if (!b || k.a.transposed || k.accumulate) return k.out.dim(1);
  if (kColumnBlock % (k.b.transposed ? b->how.block_rows : b->how.block_cols) != 0) return k.out.dim(1);
  return std::max<int64_t>(1, kColumnBlockBytes / (k.b.rows() * kColumnBlock * dtype_bytes(dtype))) * kColumnBlock;
}

}  // namespace

const Matmul& GemmEngine::matmul(const MatmulShape& shape) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Matmul>& entry = matmuls_[shape];
  // Created with the library at one thread, as it will run: the number of threads at creation decides how it splits the work.
  if (!entry) parallel_for(1, 1, [&](int64_t, int64_t) { entry = make_matmul(shape); });
  return *entry;
}

// Computes columns [first, first + cols) of the output; b has those only.
void GemmEngine::run_few_rows(const Gemm& k, Subnormals subnormals, const Tensor& a, const Tensor& b, int64_t first, int64_t cols) {
  const int64_t depth = a.dim(1), step = std::min(kFewRowsColumns, cols), tiles = ceil_div(cols, step);
  const auto shape = [&](int64_t width) {
    return MatmulShape{.rows = a.dim(0),
                       .cols = width,
                       .depth = depth,
                       .lda = depth,
                       .ldb = b.dim(1),
                       .ldc = k.out.dim(1),
                       .in = a.dtype(),
                       .out = k.out.dtype(),
                       .b_transposed = k.b.transposed,
                       .accumulate = k.accumulate,
                       .bias = k.bias.defined()};
  };
  const Matmul &whole = matmul(shape(step)), &last = matmul(shape(cols - (tiles - 1) * step));
  parallel_for(tiles, 1, subnormals, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      const int64_t col = j * step;
      (j + 1 < tiles ? whole : last)
          .run(at(a, 0), at(b, k.b.transposed ? col * depth : col), at(k.out, first + col),
               k.bias.defined() ? at(k.bias, first + col) : nullptr);
    }
  });
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
    if (has_few_rows(k, dtypes.tile)) {
      run_few_rows(k, dtypes.subnormals(), a, b, first, width);
      continue;
    }
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
  run_exactly(is_fp32(k.a) || is_fp32(k.b), [&](GemmDtypes dtypes) {
    if (has_few_rows(k, dtypes.tile)) dtypes.dequantized = dtypes.tile;  // nothing widens it on the way
    return run_column_blocks(k, dtypes, device);
  });
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
