// Runs GEMMs on the CPU. They are made of tiles (gemm_tiles.h, packed_gemm.h), except those of a few rows in generation
// (few_rows_gemm.h).
#pragma once

#include <atomic>
#include <memory>

#include "base/parallel.h"
#include "mantissa/backend/backend.h"

namespace mantissa {

// c [rows, cols] (+)= a [rows, depth] * b [depth, cols] + bias [cols]. Leading dimensions in elements; b may be stored as [cols, depth].
struct MatmulShape {
  int64_t rows, cols, depth, lda, ldb, ldc;
  Dtype in, out;  // fp32 or bf16; bias has the dtype of the inputs
  bool b_transposed, accumulate, bias;
};

// Wraps one oneDNN primitive.
class Matmul {
 public:
  virtual ~Matmul() = default;
  // Runs with as many threads as the caller's OpenMP setting allows: one inside parallel_for. Any number of threads may call it at once.
  virtual void run(const void* a, const void* b, void* c, const void* bias) const = 0;
};

// Throws Error(internal) if oneDNN has no implementation.
std::unique_ptr<Matmul> make_matmul(const MatmulShape& shape);
bool onednn_has_bf16();  // a bf16 dot product in hardware; without one, operands are widened to fp32, which is exact
bool onednn_has_amx();
// Names what oneDNN dispatches to: "AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16" ... It ends with "bf16" if onednn_has_bf16().
const char* onednn_isa_name();

struct GemmDtypes {
  Dtype tile;         // dtype that is multiplied; dense bf16 operands are widened to it on the way
  Dtype dequantized;  // dtype that quantized operands are decoded to

  // Where scales are extreme (backend.h, Gemm), the error bound of a GEMM relies on subnormals, so it is dequantized to fp32.
  Subnormals subnormals() const { return dequantized == Dtype::bf16 ? Subnormals::flushed : Subnormals::honored; }
};

class GemmEngine {
 public:
  void run(const Gemm& k, Backend& device);  // fp32, bf16 and quantized; checked by the caller
  void run(const GroupedGemm& k, Backend& device);
  int64_t fp32_gemms() const { return fp32_gemms_; }

 private:
  bool run_column_blocks(const Gemm& k, const GemmDtypes& dtypes, Backend& device);
  bool run_few_rows(const Gemm& k, Backend& device);
  bool run_few_rows(const GroupedGemm& k, Backend& device);
  bool run_groups(const GroupedGemm& k, const GemmDtypes& dtypes, Backend& device);

  // Widening bf16 is exact, and so is dequantizing to bf16 unless a scale is extreme: then run() returns false, and is called again for
  // fp32. Both paths multiply the exact values.
  template <class Run>
  void run_exactly(bool has_fp32_operand, const Run& run) {
    const Dtype tile = onednn_has_bf16() && !has_fp32_operand ? Dtype::bf16 : Dtype::f32;
    if (run(GemmDtypes{.tile = tile, .dequantized = Dtype::bf16})) return;
    if (tile == Dtype::bf16) ++fp32_gemms_;
    run(GemmDtypes{.tile = Dtype::f32, .dequantized = Dtype::f32});
  }

  std::atomic<int64_t> fp32_gemms_ = 0;
};

}  // namespace mantissa
