// Operands of one kernel call in a test: the same values on every backend, memory with margins that must stay untouched, and the list of
// outputs with the tolerance at which backends may differ.
#pragma once

#include "testing.h"

extern "C" {  // null where the program has no AddressSanitizer
[[gnu::weak]] void __asan_poison_memory_region(const volatile void*, size_t);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void*, size_t);
}

namespace mantissa::test {

// Largest error, relative to max(|expected|, root mean square), by dtype of the values. The dtype of the output itself does not matter: a
// fp32 statistic of bf16 values is computed from the same exact numbers by both backends and has its tolerance for bf16 here.
struct Tolerance {
  double f32, bf16;
};
inline constexpr Tolerance kExact{0.0, 0.0};

class Operands {
 public:
  enum class Memory { aligned, misaligned };  // misaligned: one element past a 64-byte boundary, as a slice of an arena may start
  enum class Inputs { finite, one_nan, some_subnormal };  // one_nan: the middle element of the first; some_subnormal: a third of each
  Operands(Backend& device, Dtype dtype, Memory memory = Memory::aligned, Inputs inputs = Inputs::finite)
      : device_(device), dtype_(dtype), memory_(memory), inputs_(inputs) {}
  ~Operands() { allow_margins(); }
  Operands(const Operands&) = delete;
  Operands& operator=(const Operands&) = delete;

  Backend& device() { return device_; }
  Dtype dtype() const { return dtype_; }

  Tensor input(Shape shape, double scale = 1.0, double mean = 0.0) { return input_of(dtype_, shape, scale, mean); }
  Tensor input_of(Dtype dtype, Shape shape, double scale = 1.0, double mean = 0.0) {
    std::vector<double> drawn = random_values(shape.elements(), ++draws_, scale, mean);
    if (draws_ == 1 && inputs_ == Inputs::one_nan) drawn[drawn.size() / 2] = std::nan("");
    for (size_t i = 1; i < drawn.size() && inputs_ == Inputs::some_subnormal; i += 3) drawn[i] = std::copysign(kSubnormal, drawn[i]);
    return given(dtype, shape, drawn);
  }
  Tensor given(Dtype dtype, Shape shape, const std::vector<double>& from) {
    const Tensor out = guarded(dtype, shape);
    if (!from.empty()) assign(out, from);
    return out;
  }
  Tensor indices(int64_t count, int64_t limit) {
    return given(Dtype::i32, {count}, values(random_indices(device_, count, limit, ++draws_)));
  }

  // An operand that the kernel overwrites. Before, it holds NaN; bytes hold 255.
  Tensor output(const char* name, Shape shape, Tolerance tolerance) { return output_of(dtype_, name, shape, tolerance); }
  Tensor output_of(Dtype dtype, const char* name, Shape shape, Tolerance tolerance) {
    const double before = dtype == Dtype::u8 ? 255.0 : std::nan("");
    return listed(name, given(dtype, shape, std::vector<double>(static_cast<size_t>(shape.elements()), before)), tolerance);
  }
  // An operand that the kernel reads and writes.
  Tensor updated(const char* name, Tensor tensor, Tolerance tolerance) { return listed(name, std::move(tensor), tolerance); }
  // A parameter gradient, as `accumulate` asks.
  Tensor gradient(const char* name, Shape shape, Tolerance tolerance, bool accumulate) {
    return accumulate ? updated(name, input_of(Dtype::f32, shape), tolerance) : output_of(Dtype::f32, name, shape, tolerance);
  }

  struct Result {
    const char* name;
    Tensor tensor;
    Tolerance tolerance;
  };
  const std::vector<Result>& results() const { return results_; }

  void expect_margins_untouched() const {
    allow_margins();
    for (const Guarded& g : guarded_) {
      EXPECT_TRUE(all_marks(g.before)) << "written before the first element of " << g.shape;
      EXPECT_TRUE(all_marks(g.after)) << "written past the last element of " << g.shape;
    }
  }

 private:
  static constexpr double kSubnormal = 0x1.8p-128;  // in fp32 and in bf16
  static constexpr int64_t kMargin = 256;
  static constexpr uint8_t kMark = 0xC5;
  struct Guarded {
    Tensor before, after;  // the margins of an operand
    Shape shape;           // shape of the operand
  };

  static bool all_marks(const Tensor& margin) {
    return std::ranges::all_of(bytes_of(margin), [](uint8_t byte) { return byte == kMark; });
  }

  // AddressSanitizer reports whoever reads a margin, too.
  void forbid(const Tensor& margin) const {
    if (!__asan_poison_memory_region) return;
    device_.synchronize();  // work on earlier contents of this memory, and the marks, may come late
    __asan_poison_memory_region(margin.device_bytes(), static_cast<size_t>(margin.bytes()));
  }
  void allow_margins() const {
    if (!__asan_unpoison_memory_region) return;
    for (const Guarded& g : guarded_) {
      for (const Tensor& margin : {g.before, g.after})
        __asan_unpoison_memory_region(margin.device_bytes(), static_cast<size_t>(margin.bytes()));
    }
  }

  Tensor guarded(Dtype dtype, Shape shape) {
    const int64_t begin = kMargin + (memory_ == Memory::misaligned ? dtype_bytes(dtype) : 0),
                  end = begin + shape.elements() * dtype_bytes(dtype), bytes = end + kMargin;
    const std::shared_ptr<std::byte> memory = device_.allocate(bytes);
    const Tensor all(device_, memory, device_.host_memory(), Dtype::u8, {bytes});
    device_.upload(std::vector<uint8_t>(static_cast<size_t>(bytes), kMark).data(), all);
    const Guarded& own = guarded_.emplace_back(Guarded{.before = all.slice(0, begin), .after = all.slice(end, bytes), .shape = shape});
    for (const Tensor& margin : {own.before, own.after}) forbid(margin);
    return Tensor(device_, std::shared_ptr<std::byte>(memory, memory.get() + begin), device_.host_memory(), dtype, shape);
  }
  Tensor listed(const char* name, Tensor tensor, Tolerance tolerance) {
    results_.push_back({name, tensor, tolerance});
    return tensor;
  }

  Backend& device_;
  Dtype dtype_;
  Memory memory_;
  Inputs inputs_;
  uint32_t draws_ = 0;
  std::vector<Guarded> guarded_;
  std::vector<Result> results_;
};

struct KernelCase {
  std::string kernel, variant;
  std::function<void(Operands&)> run;
};

// add("Gemm", "3x5x7", body) appends a case.
class Cases {
 public:
  void operator()(const char* kernel, const std::string& variant, std::function<void(Operands&)> run) {
    all.push_back({kernel, variant, std::move(run)});
  }
  std::vector<KernelCase> all;
};

// fp32: sums of up to a few thousand products in another order. bf16: one unit in the last place (2^-7 relative at worst) where the value
// before rounding lies near a tie. Statistics and parameter gradients of bf16 values are fp32.
inline constexpr Tolerance kValues{2e-6, 0x1p-7};
inline constexpr Tolerance kStats{2e-6, 2e-6};
inline constexpr Tolerance kSums{1e-5, 0x1p-7};
inline constexpr Tolerance kStatSums{1e-5, 1e-5};
// Bound for fp32 sums of products whose factors differ by powers of two: |d - exact| <= 1e-6 sum |a b| in any order, and for 400 terms that
// sum is up to 40 times the root mean square of the results.
inline constexpr double kGemmSums = 4e-5;
// Attention may round the probabilities to bf16 before the second GEMM, and on tensor cores their gradients, too. In bf16, weights of
// attention are rounded before they are multiplied; where few keys are seen, errors of sums of 0.0121 of their size were seen on a GPU.
inline constexpr Tolerance kAttention{1e-5, 0x1p-6}, kAttentionGradient{1e-5, 0x1.8p-6};

inline std::string named(std::initializer_list<int64_t> dims) {
  std::string out;
  for (const int64_t d : dims) out += (out.empty() ? "" : "x") + std::to_string(d);
  return out;
}

}  // namespace mantissa::test
