// Kernels of the fast CPU backend either flush subnormals or honor them. A CPU can be asked to raise a signal where arithmetic meets a
// subnormal operand, which is where some take a hundred cycles: a kernel that flushes them never does; one that honors them gives the
// reference's bits. A kernel of backend.h without an entry here fails EveryKernelHasItsMode.
#include <ucontext.h>
#include <xmmintrin.h>

#include <csignal>
#include <map>

#include "base/parallel.h"
#include "kernel_cases.h"

namespace mantissa::test::subnormals_test {

// Treatment of inputs of which a third is subnormal, in the cases of a kernel.
enum class Mode {
  flushed,  // arithmetic never sees one
  honored,  // it does
  integers  // there is no arithmetic in floating point that could
};

std::ostream& operator<<(std::ostream& out, Mode mode) {
  return out << (mode == Mode::flushed ? "flushed" : mode == Mode::honored ? "honored" : "integers");
}

const std::map<std::string, Mode>& modes() {
  static const std::map<std::string, Mode> all = [] {
    std::map<std::string, Mode> out;
    for (const char* kernel : {"Fill", "RandomNormal", "Quantize", "Dequantize", "FakeQuantize", "RequantizeColumns", "SwizzleScales",
                               "SumCounts", "EmbeddingForward", "DispatchTable", "ArrivalTable", "Permute", "FinishGradients"})
      out[kernel] = Mode::integers;
    for (const char* kernel : {"AddBias",
                               "Gemm",
                               "SumRows",
                               "EmbeddingBackward",
                               "RmsNormForward",
                               "RmsNormBackward",
                               "LayerNormForward",
                               "LayerNormBackward",
                               "QkNormForward",
                               "QkNormBackward",
                               "Rope",
                               "AttentionForward",
                               "AttentionBackward",
                               "CachedAttention",
                               "SwiGluForward",
                               "SwiGluBackward",
                               "GeluForward",
                               "GeluBackward",
                               "CrossEntropy",
                               "CrossEntropyShare",
                               "CrossEntropyOfShares",
                               "DistillationShare",
                               "DistillationOfShares",
                               "Unpermute",
                               "GroupedGemm",
                               "GroupedWeightGradient"})
      out[kernel] = Mode::flushed;
    for (const char* kernel : {"Convert", "Add", "TreeSum", "QuantizationError", "Simulate", "AttentionSinkGradient", "RouteForward",
                               "RouteBackward", "RouterLosses", "AddGroupedBias", "GroupedBiasGradient", "GroupedBiasDot", "AdamW",
                               "MuonMomentum", "DivideByNorm", "NewtonSchulzPolynomial", "MuonUpdate", "Sum", "SquaredNorm"})
      out[kernel] = Mode::honored;
    return out;
  }();
  return all;
}

volatile sig_atomic_t traps = 0;

// Counts, until the end of the block, in `traps` instructions of this thread that meet a subnormal: the first of each loop.
class DenormalTraps {
 public:
  DenormalTraps() : mxcsr_(_mm_getcsr()), traps_(traps) {
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t*, void* context) {
      traps = traps + 1;
      static_cast<ucontext_t*>(context)->uc_mcontext.fpregs->mxcsr |= _MM_MASK_DENORM;  // the instruction runs again
    };
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGFPE, &action, &before_);
    _mm_setcsr(mxcsr_ & ~static_cast<unsigned>(_MM_MASK_DENORM | _MM_EXCEPT_DENORM));
  }
  ~DenormalTraps() {
    _mm_setcsr(mxcsr_);
    ::sigaction(SIGFPE, &before_, nullptr);
  }
  DenormalTraps(const DenormalTraps&) = delete;
  DenormalTraps& operator=(const DenormalTraps&) = delete;
  bool any() const { return traps != traps_; }

 private:
  const AlternateStack stack_;  // oneDNN keeps data in the stack pointer
  unsigned mxcsr_;
  sig_atomic_t traps_;
  struct sigaction before_ {};
};

// A backend that notes which of its kernels met a subnormal.
class WatchedDevice final : public Backend {
 public:
  explicit WatchedDevice(const char* name) : kernels_(make_backend(name)) {}
  const char* name() const override { return kernels_->name(); }
  std::shared_ptr<std::byte> allocate(int64_t bytes) override { return kernels_->allocate(bytes); }
  AllocatorStats allocator_stats() const override { return kernels_->allocator_stats(); }
  bool host_memory() const override { return true; }
  bool computes_fp64() const override { return kernels_->computes_fp64(); }
  void upload(const void* from, const Tensor& to) override { kernels_->upload(from, to); }
  void download(const Tensor& from, void* to) override { kernels_->download(from, to); }
  void synchronize() override { kernels_->synchronize(); }

  const std::map<std::string, bool>& met_subnormals() const { return met_; }

 protected:
#define MANTISSA_WATCHED(Kernel)           \
  void execute(const Kernel& k) override { \
    const DenormalTraps watch;             \
    kernels_->run(k);                      \
    met_[#Kernel] |= watch.any();          \
  }
  MANTISSA_KERNELS(MANTISSA_WATCHED)
#undef MANTISSA_WATCHED

 private:
  std::unique_ptr<Backend> kernels_;
  std::map<std::string, bool> met_;
};

Operands some_subnormal(Backend& device, Dtype dtype) {
  return {device, dtype, Operands::Memory::aligned, Operands::Inputs::some_subnormal};
}

class SubnormalOperands : public ::testing::TestWithParam<Dtype> {};

// A kernel may have a fast path for one dtype, so one that honors them has to do so in each dtype for which the reference shows that they
// come. A flushed operand is less than 2^-126, and so is what is lost of each product with one of these inputs.
TEST_P(SubnormalOperands, ReachArithmeticOnlyWhereTheyAreHonoredAndChangeNoResultBeyondItsTolerance) {
  const Threads one(1);  // the exception is asked of the calling one
  WatchedDevice fast("cpu"), reference("cpu_reference");
  for (const KernelCase& c : kernel_cases()) {
    if (c.variant.ends_with("_extreme")) continue;                 // GEMMs honor subnormals there (quantized_gemm_test.cpp)
    if (c.variant.find("_branch") != std::string::npos) continue;  // norms that add as Add does, which honors them
    Operands expected = some_subnormal(reference, GetParam()), actual = some_subnormal(fast, GetParam());
    c.run(expected);
    c.run(actual);
    const double lost = modes().at(c.kernel) == Mode::flushed ? 1e-30 : 0.0;
    for (size_t i = 0; i < expected.results().size(); ++i) {
      const Operands::Result& e = expected.results()[i];
      const double tolerance = std::max(lost, GetParam() == Dtype::f32 ? e.tolerance.f32 : e.tolerance.bf16);
      EXPECT_TRUE(close(actual.results()[i].tensor, e.tensor, tolerance)) << c.kernel << ' ' << c.variant << ' ' << e.name;
    }
  }
  std::map<std::string, bool> of_fast = fast.met_subnormals(), of_reference = reference.met_subnormals();
  for (const auto& [kernel, mode] : modes()) {
    if (mode == Mode::honored) {
      EXPECT_TRUE(of_fast[kernel] || !of_reference[kernel]) << kernel << " is listed as " << mode;
    } else {
      EXPECT_FALSE(of_fast[kernel]) << kernel << " is listed as " << mode;
      EXPECT_EQ(of_reference[kernel], mode == Mode::flushed) << kernel << " of the reference; listed as " << mode;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, SubnormalOperands, ::testing::Values(Dtype::f32, Dtype::bf16),
                         [](const auto& dtype) { return std::string(dtype_name(dtype.param)); });

TEST(SubnormalModes, EveryKernelHasItsMode) {
  for (const std::string& kernel : kernel_names()) EXPECT_TRUE(modes().count(kernel)) << kernel << " is not listed";
  EXPECT_EQ(modes().size(), kernel_names().size());
}

}  // namespace mantissa::test::subnormals_test
