#include "mantissa/backend/ceilings.h"

#include <cstring>

#include "backend/cpu/fast/gemm_engine.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

constexpr int64_t kRows = 2048, kRowsOfDevice = 8192;

Tensor normal_matrix(Backend& device, Dtype dtype, int64_t rows, uint32_t what) {
  Tensor normal = empty(device, Dtype::f32, {rows, rows});
  device.run(RandomNormal{.out = normal, .key = {.seed = 1, .stream = RngStream::test}, .what = what, .first_index = 0, .std = 1.0});
  return converted(normal, dtype);
}

int64_t rows_of(const Backend& device) { return device.host_memory() ? kRows : kRowsOfDevice; }

double flops_of(int64_t rows) {
  const auto n = static_cast<double>(rows);
  return 2.0 * n * n * n;
}

}  // namespace

GemmCeiling::GemmCeiling(Backend& device, Dtype dtype, int64_t rows) : device_(device) {
  const bool cpu = device.host_memory();
  const Dtype measured = !cpu || (dtype == Dtype::bf16 && onednn_has_bf16()) ? dtype : Dtype::f32;
  const int64_t size = rows > 0 ? rows : rows_of(device);
  a_ = normal_matrix(device, measured, size, 0);
  b_ = normal_matrix(device, measured, size, 1);
  out_ = empty_like(a_);
  if (!cpu) return;
  with_library_threads([&] {
    gemm_ = make_matmul({.rows = size,
                         .cols = size,
                         .depth = size,
                         .lda = size,
                         .ldb = size,
                         .ldc = size,
                         .in = measured,
                         .out = measured,
                         .b_transposed = false,
                         .accumulate = false,
                         .bias = false});
  });
}

double GemmCeiling::flops() const { return flops_of(a_.dim(0)); }
double GemmCeiling::flops(const Backend& device) { return flops_of(rows_of(device)); }

void GemmCeiling::run() {
  if (!gemm_) return device_.run(Gemm{.a = {a_}, .b = {b_}, .out = out_, .accumulate = false});
  with_library_threads([&] { gemm_->run(a_.device_bytes(), b_.device_bytes(), out_.device_bytes(), nullptr); });
}

CopyCeiling::CopyCeiling(Backend& device, int64_t bytes)
    : device_(device), from_(zeros(device, Dtype::f32, {bytes / 4})), to_(zeros(device, Dtype::f32, {bytes / 4})) {}

void CopyCeiling::run() {
  if (!device_.host_memory()) return device_.run(Convert{.x = from_, .out = to_});
  constexpr int64_t kPiece = int64_t{1} << 20;
  parallel_for(from_.bytes(), kPiece, [&](int64_t begin, int64_t end) {
    std::memcpy(to_.device_bytes() + begin, from_.device_bytes() + begin, static_cast<size_t>(end - begin));
  });
}

std::string gemm_instruction_set() { return onednn_isa_name(); }

}  // namespace mantissa
