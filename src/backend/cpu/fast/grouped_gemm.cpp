#include <vector>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/few_rows_gemm.h"
#include "backend/cpu/fast/gemm_engine.h"
#include "backend/cpu/fast/gemm_tiles.h"
#include "backend/cpu/groups.h"
#include "mantissa/backend/ceilings.h"
#include "mantissa/backend/few_rows.h"
#include "mantissa/base/integers.h"

namespace mantissa {

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

}  // namespace mantissa
