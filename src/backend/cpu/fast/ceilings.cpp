#include "mantissa/backend/ceilings.h"

#include <cstring>

#include "backend/cpu/fast/gemm_engine.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

constexpr int64_t kSize = 2048;

Tensor normal_matrix(Backend& cpu, Dtype dtype, uint32_t what) {
  Tensor normal = empty(cpu, Dtype::f32, {kSize, kSize});
  cpu.run(RandomNormal{.out = normal, .key = {.seed = 1, .stream = RngStream::test}, .what = what, .first_index = 0, .std = 1.0});
  return converted(normal, dtype);
}

}  // namespace

GemmCeiling::GemmCeiling(Backend& cpu, Dtype dtype) {
  const Dtype measured = dtype == Dtype::bf16 && onednn_has_bf16() ? Dtype::bf16 : Dtype::f32;
  a_ = normal_matrix(cpu, measured, 0);
  b_ = normal_matrix(cpu, measured, 1);
  out_ = empty_like(a_);
  with_library_threads([&] {
    gemm_ = make_matmul({.rows = kSize,
                         .cols = kSize,
                         .depth = kSize,
                         .lda = kSize,
                         .ldb = kSize,
                         .ldc = kSize,
                         .in = measured,
                         .out = measured,
                         .b_transposed = false,
                         .accumulate = false,
                         .bias = false});
  });
}

double GemmCeiling::flops() const { return 2.0 * static_cast<double>(kSize) * static_cast<double>(kSize) * static_cast<double>(kSize); }

void GemmCeiling::run() {
  with_library_threads([&] { gemm_->run(a_.device_bytes(), b_.device_bytes(), out_.device_bytes(), nullptr); });
}

CopyCeiling::CopyCeiling(Backend& cpu, int64_t bytes)
    : from_(zeros(cpu, Dtype::f32, {bytes / 4})), to_(zeros(cpu, Dtype::f32, {bytes / 4})) {}

void CopyCeiling::run() {
  constexpr int64_t kPiece = int64_t{1} << 20;
  parallel_for(from_.bytes(), kPiece, [&](int64_t begin, int64_t end) {
    std::memcpy(to_.device_bytes() + begin, from_.device_bytes() + begin, static_cast<size_t>(end - begin));
  });
}

std::string gemm_instruction_set() { return onednn_isa_name(); }

}  // namespace mantissa
