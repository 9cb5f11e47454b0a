// Matrix products on the CPU by oneDNN. The output is cut into tiles that depend on the shape only; each tile is one single-threaded
// library call inside our own parallel loop, so results do not depend on the number of threads (oneDNN's own threading changes bits with
// it). A transposed first operand is packed contiguously per tile: the library's AVX2 path is 2.5 times slower on it.
//
// Groups of rows (grouped_gemm.cpp) are cut into tiles of such heights that a row's bits do not depend on how many others its group has,
// the last one filled up.
//
// TileProduct is one oneDNN primitive (tile_product.cpp).
#pragma once

#include <atomic>
#include <compare>
#include <map>
#include <memory>
#include <mutex>

#include "mantissa/backend/backend.h"

namespace mantissa {

// c [rows, cols] (+)= a [rows, depth] * b [depth, cols] + bias [cols]. Leading dimensions in elements; b may be stored as [cols, depth].
struct TileShape {
  int64_t rows, cols, depth, lda, ldb, ldc;
  Dtype in, out;  // fp32 or bf16; bias has the dtype of the inputs
  bool b_transposed, accumulate, bias;
  auto operator<=>(const TileShape&) const = default;  // NOLINT(modernize-use-nullptr): version 14 takes its literal 0 for a pointer
};

class TileProduct {
 public:
  virtual ~TileProduct() = default;
  // With as many threads as the caller's OpenMP setting allows: one inside parallel_for. Any number of threads may call it at once.
  virtual void run(const void* a, const void* b, void* c, const void* bias) const = 0;
};

// Throws Error(internal) if oneDNN has no implementation.
std::unique_ptr<TileProduct> make_tile_product(const TileShape& shape);
bool onednn_has_bf16();  // a bf16 dot product in hardware; without one, operands are widened to fp32, which is exact
bool onednn_has_avx512();
const char* onednn_isa_name();  // what oneDNN dispatches to: "AVX2", "AVX-512", "AVX-512 bf16", ...

class GemmEngine {
 public:
  void run(const Gemm& k, Backend& device);  // fp32, bf16 and quantised; checked by the caller
  void run(const GroupedGemm& k, Backend& device);
  int64_t fp32_products() const { return fp32_products_; }

 private:
  struct Problem;
  const TileProduct& product(const TileShape& shape);
  bool run_bands(const Gemm& k, Dtype dtype, Backend& device);
  void run_tiles(const Problem& problem);
  struct GroupProblem;
  bool run_groups(const GroupedGemm& k, Dtype dtype, Backend& device);
  void run_tiles(const GroupProblem& problem);

  std::atomic<int64_t> fp32_products_ = 0;
  std::mutex mutex_;
  std::map<TileShape, std::unique_ptr<TileProduct>> products_;
};

}  // namespace mantissa
