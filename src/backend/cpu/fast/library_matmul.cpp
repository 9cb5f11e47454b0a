#include <unordered_map>
#include <vector>

#include "backend/cpu/fast/gemm_engine.h"
#include "backend/cpu/fast/onednn_matmul.h"
#include "mantissa/base/generated_call.h"
#include "mantissa/base/limits.h"

namespace mantissa {
namespace {

using dnnl::memory;

// The library writes its kernels, a few dozen of 256 KiB at most, without a look at whether there was memory for them.
constexpr int64_t kKernelBytes = int64_t{16} << 20;

class LibraryMatmul final : public Matmul {
 public:
  explicit LibraryMatmul(const MatmulShape& s)
      : operands_{
            .a = matrix_description(s.rows, s.depth, s.in, s.lda, 1),
            .b = s.b_transposed ? matrix_description(s.depth, s.cols, s.in, 1, s.ldb) : matrix_description(s.depth, s.cols, s.in, s.ldb, 1),
            .c = matrix_description(s.rows, s.cols, s.out, s.ldc, 1),
            .bias = matrix_description(1, s.cols, s.in, s.cols, 1),
            .with_bias = s.bias} {
    const auto primitive = describe_gemm(operands_, s.accumulate, text(s.rows, " x ", s.cols, " x ", s.depth, " for ", s.in));
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
    const GeneratedCall here;
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

std::unique_ptr<Matmul> make_matmul(const MatmulShape& shape) { return std::make_unique<LibraryMatmul>(shape); }

}  // namespace mantissa
