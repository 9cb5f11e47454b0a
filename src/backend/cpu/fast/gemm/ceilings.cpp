#include "backend/ceilings.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "backend/cpu/fast/gemm/onednn_matmul.h"
#include "backend/cpu/fast/gemm/packed_gemm.h"
#include "base/generated_call.h"
#include "base/limits.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using dnnl::memory;

// The library writes its kernels, a few dozen of 256 KiB at most, without a look at whether there was memory for them.
constexpr int64_t kKernelBytes = int64_t{16} << 20;

}  // namespace

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::data_type data_type_of(Dtype dtype) { return dtype == Dtype::bf16 ? memory::data_type::bf16 : memory::data_type::f32; }

memory::desc matrix_description(int64_t rows, int64_t cols, Dtype dtype, int64_t row_stride, int64_t col_stride) {
  return memory::desc({rows, cols}, data_type_of(dtype), memory::dims{row_stride, col_stride});
}

dnnl::matmul::primitive_desc describe_gemm(const MatmulOperands& operands, bool accumulate, const std::string& which) {
  require_memory(kKernelBytes, "a GEMM");
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // the library's own is not safe for concurrent calls
  if (accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0F);
    attributes.set_post_ops(sum);
  }
  try {
    return describe_matmul(operands, attributes, cpu_engine());
  } catch (const dnnl::error& error) {
    fail(ExitCode::internal, "oneDNN has no GEMM ", which, ": ", error.what());
  }
}

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

struct GemmCeiling::Library {
  memory::desc matrix, scratchpad;
  dnnl::matmul matmul;
};

int64_t GemmCeiling::usual_rows(const Backend& device) { return device.host_memory() ? 2048 : 8192; }

GemmCeiling::GemmCeiling(Backend& device, Dtype dtype, int64_t rows) : device_(device) {
  const bool cpu = device.host_memory();
  const GemmDevice gemms = device.gemm_device();
  require(gemms.architecture == 0 || gemms.library > 0, ExitCode::environment,
          "the GEMM ceiling of a GPU is measured with cuBLASLt, which was not loaded: the log says why");
  const Dtype measured = !cpu || (dtype == Dtype::bf16 && onednn_has_bf16()) ? dtype : Dtype::f32;
  a_ = normal_matrix(device, measured, rows, 0);
  b_ = normal_matrix(device, measured, rows, 1);
  out_ = empty_like(a_);
  if (!cpu) return;
  with_library_threads([&] {
    const memory::desc matrix = matrix_description(rows, rows, measured, rows, 1);
    const auto primitive =
        describe_gemm({.a = matrix, .b = matrix, .c = matrix}, false, text(rows, " x ", rows, " x ", rows, " for ", measured));
    library_ =
        std::make_shared<Library>(Library{.matrix = matrix, .scratchpad = primitive.scratchpad_desc(), .matmul = dnnl::matmul(primitive)});
  });
}

double GemmCeiling::flops() const {
  const auto rows = static_cast<double>(a_.dim(0));
  return 2.0 * rows * rows * rows;
}

void GemmCeiling::run() {
  if (!library_) return device_.run(Gemm{.a = {a_}, .b = {b_}, .out = out_, .accumulate = false});
  with_library_threads([&] {
    thread_local dnnl::stream stream(cpu_engine());
    thread_local std::vector<std::byte> scratch;
    if (scratch.size() < library_->scratchpad.get_size()) scratch.resize(library_->scratchpad.get_size());
    const auto matrix = [&](const Tensor& tensor) { return memory(library_->matrix, cpu_engine(), tensor.device_bytes()); };
    const std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, matrix(a_)},
                                                    {DNNL_ARG_WEIGHTS, matrix(b_)},
                                                    {DNNL_ARG_DST, matrix(out_)},
                                                    {DNNL_ARG_SCRATCHPAD, memory(library_->scratchpad, cpu_engine(), scratch.data())}};
    const GeneratedCall here;
    library_->matmul.execute(stream, arguments);
    stream.wait();
  });
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
