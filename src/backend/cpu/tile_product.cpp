#include <unordered_map>
#include <vector>

#include "backend/cpu/gemm_engine.h"
#include "backend/cpu/onednn_matmul.h"
#include "mantissa/base/limits.h"

namespace mantissa {
namespace {

using dnnl::memory;

// The library writes its kernels, a few dozen of 256 KiB at most, without a look at whether there was memory for them.
constexpr int64_t kKernelBytes = int64_t{16} << 20;

const dnnl::engine& cpu_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

memory::desc matrix(int64_t rows, int64_t cols, Dtype dtype, int64_t row_stride, int64_t col_stride) {
  const auto type = dtype == Dtype::bf16 ? memory::data_type::bf16 : memory::data_type::f32;
  return memory::desc({rows, cols}, type, memory::dims{row_stride, col_stride});
}

class Matmul final : public TileProduct {
 public:
  explicit Matmul(const TileShape& s)
      : operands_{.a = matrix(s.rows, s.depth, s.in, s.lda, 1),
                  .b = s.b_transposed ? matrix(s.depth, s.cols, s.in, 1, s.ldb) : matrix(s.depth, s.cols, s.in, s.ldb, 1),
                  .c = matrix(s.rows, s.cols, s.out, s.ldc, 1),
                  .bias = matrix(1, s.cols, s.in, s.cols, 1),
                  .with_bias = s.bias} {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);  // the library's own is not safe for concurrent calls
    if (s.accumulate) {
      dnnl::post_ops sum;
      sum.append_sum(1.0F);
      attributes.set_post_ops(sum);
    }
    const auto primitive = describe_matmul(operands_, attributes, cpu_engine());
    scratchpad_ = primitive.scratchpad_desc();
    matmul_ = dnnl::matmul(primitive);
  }

  void run(const void* a, const void* b, void* c, const void* bias) const override {
    thread_local dnnl::stream stream(cpu_engine());
    thread_local std::vector<std::byte> scratch;
    if (scratch.size() < scratchpad_.get_size()) scratch.resize(scratchpad_.get_size());
    std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, wrap(operands_.a, a)},
                                              {DNNL_ARG_WEIGHTS, wrap(operands_.b, b)},
                                              {DNNL_ARG_DST, wrap(operands_.c, c)},
                                              {DNNL_ARG_SCRATCHPAD, wrap(scratchpad_, scratch.data())}};
    if (bias) arguments.emplace(DNNL_ARG_BIAS, wrap(operands_.bias, bias));
    matmul_.execute(stream, arguments);
    stream.wait();
  }

 private:
  static memory wrap(const memory::desc& description, const void* data) {
    return memory(description, cpu_engine(), const_cast<void*>(data));
  }

  MatmulOperands operands_;
  memory::desc scratchpad_;
  dnnl::matmul matmul_;
};

}  // namespace

std::unique_ptr<TileProduct> make_tile_product(const TileShape& shape) {
  require_memory(kKernelBytes, "a matrix product");
  try {
    return std::make_unique<Matmul>(shape);
  } catch (const dnnl::error& error) {
    fail(ExitCode::internal, "oneDNN has no matrix product ", shape.rows, " x ", shape.cols, " x ", shape.depth, " for ", shape.in, ": ",
         error.what());
  }
}

// The instruction sets are ordered in oneDNN: each includes those before it.
bool onednn_has_bf16() { return dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core_bf16; }

bool onednn_has_avx512() { return dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core; }

const char* onednn_isa_name() {
  const auto isa = dnnl::get_effective_cpu_isa();
  if (isa >= dnnl::cpu_isa::avx512_core_bf16) return "AVX-512 bf16";
  if (onednn_has_avx512()) return "AVX-512";
  if (isa >= dnnl::cpu_isa::avx2) return "AVX2";
  return "SSE4.1";
}

}  // namespace mantissa
