#include "mantissa/backend/ceilings.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "backend/cpu/fast/gemm_engine.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

constexpr int64_t kRowsDrawn = 256;

// Rows are drawn on the host, so a large matrix has some of them again and again.
Tensor normal_matrix(Backend& device, Dtype dtype, int64_t rows, uint32_t what) {
  const int64_t drawn = std::min(rows, kRowsDrawn);
  const Tensor normal = empty(device, Dtype::f32, {drawn, rows}), out = empty(device, dtype, {rows, rows});
  device.run(RandomNormal{.out = normal, .key = {.seed = 1, .stream = RngStream::test}, .what = what, .first_index = 0, .std = 1.0});
  std::vector<int32_t> ids(static_cast<size_t>(rows));
  for (int64_t i = 0; i < rows; ++i) ids[static_cast<size_t>(i)] = static_cast<int32_t>(i % drawn);
  device.run(EmbeddingForward{.ids = from_host(device, Dtype::i32, {rows}, ids.data()), .weight = converted(normal, dtype), .out = out});
  return out;
}

}  // namespace

int64_t GemmCeiling::usual_rows(const Backend& device) { return device.host_memory() ? 2048 : 8192; }

GemmCeiling::GemmCeiling(Backend& device, Dtype dtype, int64_t rows) : device_(device) {
  const bool cpu = device.host_memory();
  const GemmDevice gemms = device.gemm_device();
  require(gemms.architecture == 0 || gemms.library > 0, ExitCode::environment,
          "the ceiling of GEMMs on a GPU is that of cuBLASLt, which was not loaded: the log says why");
  const Dtype measured = !cpu || (dtype == Dtype::bf16 && onednn_has_bf16()) ? dtype : Dtype::f32;
  a_ = normal_matrix(device, measured, rows, 0);
  b_ = normal_matrix(device, measured, rows, 1);
  out_ = empty_like(a_);
  if (!cpu) return;
  with_library_threads([&] {
    gemm_ = make_matmul({.rows = rows,
                         .cols = rows,
                         .depth = rows,
                         .lda = rows,
                         .ldb = rows,
                         .ldc = rows,
                         .in = measured,
                         .out = measured,
                         .b_transposed = false,
                         .accumulate = false,
                         .bias = false});
  });
}

double GemmCeiling::flops() const {
  const auto rows = static_cast<double>(a_.dim(0));
  return 2.0 * rows * rows * rows;
}

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
