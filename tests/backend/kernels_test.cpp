// Every kernel of every backend against the reference, in fp32 and bf16, over ragged shapes; and the same bits from each for any number of
// threads and any alignment. A kernel of backend.h without a case fails EveryKernelHasACase.
#include <set>

#include "kernel_backends.h"
#include "kernel_cases.h"

namespace mantissa::test::kernels_test {

// One test per kernel and dtype: a case is named in the failure.
class Kernels : public ::testing::TestWithParam<std::tuple<std::string, Dtype>> {
 protected:
  template <class Body>
  void for_each_case(Body body) const {
    const auto& [kernel, dtype] = GetParam();
    for (const KernelCase& c : kernel_cases()) {
      if (c.kernel != kernel) continue;
      SCOPED_TRACE(c.kernel + " " + c.variant);
      body(c, dtype);
      if (HasFailure()) return;
    }
  }

  const KernelBackends backends_;
};

void expect_close(const Operands& actual, const Operands& expected, Dtype dtype) {
  for (size_t i = 0; i < expected.results().size(); ++i) {
    const Operands::Result& e = expected.results()[i];
    const Tolerance& of_backend = actual.results()[i].tolerance;
    const double tolerance = dtype == Dtype::f32 ? of_backend.f32 : of_backend.bf16;
    EXPECT_TRUE(close(actual.results()[i].tensor, e.tensor, tolerance)) << e.name;
  }
}

void expect_finite(const Operands& operands) {
  for (const Operands::Result& result : operands.results()) {
    const std::vector<double> numbers = values(result.tensor);
    EXPECT_TRUE(std::ranges::all_of(numbers, [](double x) { return std::isfinite(x); })) << result.name << " of the reference";
  }
}

TEST_P(Kernels, FastPathEqualsTheReference) {
  for (size_t i = 0; i < all_backends().size(); ++i) ASSERT_EQ(backends_.all()[i]->name(), all_backends()[i]);
  for_each_case([&](const KernelCase& c, Dtype dtype) {
    Operands expected(backends_.reference(), dtype);
    c.run(expected);
    expect_finite(expected);
    expected.expect_margins_untouched();
    for (Backend* device : backends_.tested()) {
      if (!has_kernel(*device, c.kernel)) continue;
      SCOPED_TRACE(device->name());
      Operands actual(*device, dtype);
      c.run(actual);
      expect_close(actual, expected, dtype);
      actual.expect_margins_untouched();
    }
  });
}

void expect_same_nan(const Operands& actual, const Operands& expected) {
  for (size_t i = 0; i < expected.results().size(); ++i) {
    const std::vector<double> e = values(expected.results()[i].tensor), a = values(actual.results()[i].tensor);
    for (size_t j = 0; j < e.size(); ++j) {
      if (std::isnan(e[j]) && !std::isnan(a[j])) {
        ADD_FAILURE() << expected.results()[i].name << '[' << j << "] is " << a[j] << ", NaN on the reference";
        break;
      }
    }
  }
}

// A run that went wrong must show in the loss and the gradient norm: vector code that clamps or takes maxima easily turns NaN into a
// number.
TEST_P(Kernels, NanIsNotLost) {
  for_each_case([&](const KernelCase& c, Dtype dtype) {
    Operands expected(backends_.reference(), dtype, Operands::Memory::aligned, Operands::Inputs::one_nan);
    c.run(expected);
    for (Backend* device : backends_.tested()) {
      if (!has_kernel(*device, c.kernel)) continue;
      SCOPED_TRACE(device->name());
      Operands actual(*device, dtype, Operands::Memory::aligned, Operands::Inputs::one_nan);
      c.run(actual);
      expect_same_nan(actual, expected);
    }
  });
}

void expect_same_bits(Backend& device, const KernelCase& c, Dtype dtype, const Operands& once, int threads, Operands::Memory memory) {
  const Threads scope(threads);
  Operands again(device, dtype, memory);
  c.run(again);
  for (size_t i = 0; i < once.results().size(); ++i) {
    EXPECT_TRUE(same_bits(again.results()[i].tensor, once.results()[i].tensor))
        << once.results()[i].name << ", " << device.name() << ", " << threads << " threads"
        << (memory == Operands::Memory::misaligned ? ", misaligned" : "");
  }
  again.expect_margins_untouched();
}

TEST_P(Kernels, BitsDoNotDependOnThreadsOrAlignment) {
  for_each_case([&](const KernelCase& c, Dtype dtype) {
    for (Backend* device : backends_.all()) {
      if (!has_kernel(*device, c.kernel)) continue;
      Operands once(*device, dtype);
      {
        const Threads one(1);
        c.run(once);
      }
      expect_same_bits(*device, c, dtype, once, 3, Operands::Memory::misaligned);
      if (device != &backends_.reference()) expect_same_bits(*device, c, dtype, once, 8, Operands::Memory::aligned);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(, Kernels, ::testing::Combine(::testing::ValuesIn(kernel_names()), ::testing::Values(Dtype::f32, Dtype::bf16)),
                         [](const auto& c) { return std::get<0>(c.param) + "_" + dtype_name(std::get<1>(c.param)); });

// Kernels on bf16 take long rows in blocks: NaN, Inf and subnormals among them, an element gives the bits that it gives alone. Of two NaNs
// that are multiplied either may be the result: the compiler orders the factors of vectors and of a last element as it likes.
class EveryBf16 : public OnEachBackend {
 protected:
  // run(matrices of one row, their width) gives a result as wide as they are, or wider by a whole factor. Every pattern comes in each.
  template <class Run>
  void expect_alike_in_any_place(int64_t matrices, const Run& run) {
    constexpr int64_t kPatterns = 1 << 16;
    const auto row = [&](int64_t matrix, int64_t first, int64_t width) {
      std::vector<bf16> out;
      for (int64_t i = first; i < first + width; ++i) out.push_back({static_cast<uint16_t>(i * (2 * matrix + 40503))});
      return from_host(device(), Dtype::bf16, {1, width}, out.data());
    };
    const auto result = [&](int64_t first, int64_t width) {
      std::vector<Tensor> given;
      for (int64_t m = 0; m < matrices; ++m) given.push_back(row(m, first, width));
      return to_host<bf16>(run(given, width));
    };
    const std::vector<bf16> all = result(0, kPatterns);
    for (const int64_t width : {1, 2, 255, 257, 511, 514, 1031}) {
      for (int64_t first = 0; first + width <= kPatterns; first += std::max(width, kPatterns / 64)) {
        const std::vector<bf16> part = result(first, width);
        for (int64_t i = 0; i < std::ssize(part); ++i) {
          const int64_t at = i / width * kPatterns + first + i % width;
          const bf16 alone = part[static_cast<size_t>(i)], among_others = all[static_cast<size_t>(at)];
          if (std::isnan(to_float(alone)) && std::isnan(to_float(among_others))) continue;
          ASSERT_EQ(alone.bits, among_others.bits) << "element " << at << ", alone in " << width;
        }
      }
    }
  }
  Tensor halves(const Tensor& a, const Tensor& b) {
    std::vector<bf16> both = to_host<bf16>(a), second = to_host<bf16>(b);
    both.insert(both.end(), second.begin(), second.end());
    return from_host(device(), Dtype::bf16, {1, std::ssize(both)}, both.data());
  }
};

INSTANTIATE_TEST_SUITE_P(, EveryBf16, ::testing::ValuesIn(tested_backends()), backend_of);

TEST_P(EveryBf16, GivesTheSameGeluInAnyPlace) {
  for (const GeluForm form : {GeluForm::tanh, GeluForm::erf}) {
    expect_alike_in_any_place(1, [&](const std::vector<Tensor>& in, int64_t) {
      const Tensor out = empty_like(in[0]);
      device().run(GeluForward{.x = in[0], .out = out, .form = form});
      return out;
    });
    expect_alike_in_any_place(2, [&](const std::vector<Tensor>& in, int64_t) {
      const Tensor dx = empty_like(in[0]);
      device().run(GeluBackward{.x = in[0], .dy = in[1], .dx = dx, .form = form});
      return dx;
    });
  }
}

TEST_P(EveryBf16, GivesTheSameSwiGluInAnyPlace) {
  for (const double limit : {0.0, 7.0}) {
    expect_alike_in_any_place(2, [&](const std::vector<Tensor>& in, int64_t) {
      const Tensor out = empty_like(in[0]);
      device().run(SwiGluForward{.x = halves(in[0], in[1]), .out = out, .limit = limit});
      return out;
    });
    expect_alike_in_any_place(3, [&](const std::vector<Tensor>& in, int64_t width) {
      const Tensor dx = empty(device(), Dtype::bf16, {1, 2 * width});
      device().run(SwiGluBackward{.x = halves(in[0], in[1]), .dy = in[2], .dx = dx, .limit = limit});
      return dx;
    });
  }
}

// Values that a limit cuts off have no gradient; the others, the limit itself included, have one; a NaN is not cut off.
TEST(ClampedSwiGlu, IsThatOfGptOss) {
  const double nan = std::nan("");
  const std::vector<double> gate{1, 7, 8, -20, 3, 2, nan, 2}, up{2, 7, 0.5, 1, -9, 8, 1, nan};
  const auto value = [](double g, double u) {
    return std::min(g, 7.0) / (1 + std::exp(-1.702 * std::min(g, 7.0))) * (std::clamp(u, -7.0, 7.0) + 1);
  };
  std::vector<double> both = gate;
  both.insert(both.end(), up.begin(), up.end());
  for (const std::string& name : all_backends()) {
    const auto device = make_backend(name);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Tensor x = tensor_of(*device, dtype, {1, 16}, both), out = empty(*device, dtype, {1, 8}), dx = empty_like(x);
      device->run(SwiGluForward{.x = x, .out = out, .limit = 7.0});
      device->run(SwiGluBackward{.x = x, .dy = tensor_of(*device, dtype, {1, 8}, std::vector<double>(8, 1.0)), .dx = dx, .limit = 7.0});
      const std::vector<double> y = values(out), d = values(dx);
      for (size_t i = 0; i < 6; ++i) {
        EXPECT_NEAR(y[i], value(gate[i], up[i]), std::abs(value(gate[i], up[i])) * 0.005 + 1e-9) << name << i;
        EXPECT_EQ(d[i] == 0.0, gate[i] > 7) << name << i;
        EXPECT_EQ(d[8 + i] == 0.0, std::abs(up[i]) > 7) << name << i;
      }
      for (const size_t i : {6U, 7U}) EXPECT_TRUE(std::isnan(y[i]) && std::isnan(d[i])) << name << i;
    }
  }
}

// Logits far below the largest one have a gradient of zero, not some tiny number that a fast exponential makes of it.
TEST(CrossEntropyGradient, IsZeroWhereTheProbabilityUnderflows) {
  constexpr int64_t kVocab = 1030;
  std::vector<double> logits(kVocab, -100.0);
  logits[3] = logits[700] = 0.0;
  logits[5] = -std::numeric_limits<double>::infinity();
  for (const std::string& name : tested_backends()) {
    const auto device = make_backend(name);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Tensor x = tensor_of(*device, dtype, {1, kVocab}, logits), dlogits = empty_like(x);
      device->run(CrossEntropy{.logits = x,
                               .targets = tensor_of(*device, Dtype::i32, {1}, {3}),
                               .loss = empty(*device, Dtype::f32, {1}),
                               .vocab = kVocab,
                               .scale = 1.0,
                               .dlogits = dlogits});
      const std::vector<double> gradient = values(dlogits);
      for (size_t i = 0; i < gradient.size(); ++i)
        EXPECT_EQ(gradient[i], i == 3 ? -0.5 : i == 700 ? 0.5 : 0.0) << i << ' ' << dtype << ' ' << name;
    }
  }
}

// A rank whose columns are all padding, and one whose columns are all -Inf, say so with a number that changes no sum.
TEST(CrossEntropyShareKernel, IsMinusInfinityWithoutColumns) {
  for (const std::string& name : all_backends()) {
    const auto device = make_backend(name);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      const Tensor sums = empty(*device, Dtype::f32, {2, 2}), targets = tensor_of(*device, Dtype::i32, {2}, {3, 64});
      const CrossEntropyShare share{
          .logits = random_tensor(*device, dtype, {2, 32}, 1), .targets = targets, .sums = sums, .first = 96, .vocab = 65};
      device->run(share);
      EXPECT_EQ(values(sums), (std::vector<double>{-HUGE_VAL, 0, -HUGE_VAL, 0})) << name << dtype;
      CrossEntropyShare masked = share;
      device->run(Fill{.out = share.logits, .value = -HUGE_VAL});
      masked.first = 0;
      device->run(masked);
      EXPECT_EQ(values(sums), (std::vector<double>{-HUGE_VAL, -HUGE_VAL, -HUGE_VAL, 0})) << name << dtype;
      const Tensor all = tensor_of(*device, Dtype::f32, {2, 2, 2}, {2, 0.5, 3, 0, -HUGE_VAL, 0, -HUGE_VAL, 1});
      const Tensor loss = empty(*device, Dtype::f32, {2}), dlogits = empty(*device, dtype, {2, 32});
      device->run(CrossEntropyOfShares{.logits = share.logits,
                                       .targets = targets,
                                       .sums = all,
                                       .loss = loss,
                                       .first = 96,
                                       .vocab = 65,
                                       .scale = 1.0,
                                       .dlogits = dlogits});
      EXPECT_EQ(values(loss), (std::vector<double>{1.5, 2})) << name << dtype;
      EXPECT_EQ(values(dlogits), std::vector<double>(64)) << name << dtype;
    }
  }
}

// Runs both kernels on whole rows, without padding; returns the losses, then the gradient.
std::vector<double> distilled(Backend& device, const Tensor& logits, const Tensor& teacher, const std::vector<double>& targets,
                              const Taught& how) {
  const int64_t rows = logits.dim(0), vocab = logits.dim(1);
  const Tensor sums = empty(device, Dtype::f32, {1, rows, DistillationShare::kSums}), loss = empty(device, Dtype::f32, {rows});
  const Tensor at = tensor_of(device, Dtype::i32, {rows}, targets), dlogits = empty_like(logits);
  device.run(DistillationShare{.logits = logits,
                               .teacher = teacher,
                               .targets = at,
                               .sums = sums.view({rows, DistillationShare::kSums}),
                               .first = 0,
                               .vocab = vocab,
                               .temperature = how.temperature});
  device.run(DistillationOfShares{.logits = logits,
                                  .teacher = teacher,
                                  .targets = at,
                                  .sums = sums,
                                  .loss = loss,
                                  .first = 0,
                                  .vocab = vocab,
                                  .temperature = how.temperature,
                                  .weight = how.weight,
                                  .scale = 1.0,
                                  .dlogits = dlogits});
  std::vector<double> out = values(loss), gradient = values(dlogits);
  out.insert(out.end(), gradient.begin(), gradient.end());
  return out;
}

// A rank whose columns are all padding, and a row without a target, say so with numbers that change no sum.
TEST(DistillationKernel, SumsNothingWithoutColumns) {
  for (const std::string& name : all_backends()) {
    const auto device = make_backend(name);
    const Tensor sums = empty(*device, Dtype::f32, {2, 5}), targets = tensor_of(*device, Dtype::i32, {2}, {3, -1});
    const Tensor logits = random_tensor(*device, Dtype::bf16, {2, 32}, 1), teacher = random_tensor(*device, Dtype::bf16, {2, 32}, 2);
    const auto share_of = [&](int64_t first) {
      device->run(DistillationShare{
          .logits = logits, .teacher = teacher, .targets = targets, .sums = sums, .first = first, .vocab = 65, .temperature = 2.0});
      return values(sums);
    };
    EXPECT_EQ(share_of(96), (std::vector<double>{-HUGE_VAL, -HUGE_VAL, 0, -HUGE_VAL, 0, 0, 0, 0, 0, 0})) << name;
    const Tensor all =
        tensor_of(*device, Dtype::f32, {2, 2, 5}, {2, 3, 0.5, 4, 1, 0, 0, 0, 0, 0, -HUGE_VAL, -HUGE_VAL, 0, -HUGE_VAL, 0, 0, 0, 0, 0, 0});
    const Tensor loss = empty(*device, Dtype::f32, {2}), dlogits = empty_like(logits);
    device->run(DistillationOfShares{.logits = logits,
                                     .teacher = teacher,
                                     .targets = targets,
                                     .sums = all,
                                     .loss = loss,
                                     .first = 96,
                                     .vocab = 65,
                                     .temperature = 2.0,
                                     .weight = 0.5,
                                     .scale = 1.0,
                                     .dlogits = dlogits});
    EXPECT_EQ(values(loss), (std::vector<double>{0.5 * 4 * (0.5 + 2 - 3) + 0.5 * (4 - 1), 0})) << name;
    EXPECT_EQ(values(dlogits), std::vector<double>(64)) << name;
    share_of(64);  // one column
    for (const double sum : values(sums)) EXPECT_TRUE(std::isfinite(sum)) << name;
  }
}

TEST(DistillationKernel, FindsNoDivergenceOfLogitsFromThemselves) {
  for (const std::string& name : all_backends()) {
    const auto device = make_backend(name);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const double temperature : {1.0, 0.7, 3.0}) {
        const Tensor logits = random_tensor(*device, dtype, {3, 1030}, 1), copy = random_tensor(*device, dtype, {3, 1030}, 1);
        EXPECT_EQ(distilled(*device, logits, copy, {3, 700, 1029}, {temperature, 1.0}), std::vector<double>(3 + 3 * 1030))
            << name << dtype << temperature;
      }
    }
  }
}

// A row that is not finite, in whichever model and column, is never a loss that looks like one. Other rows do not see it.
TEST(DistillationKernel, LaundersNoLogitThatIsNotFinite) {
  constexpr int64_t kColumns = 600;
  for (const std::string& name : all_backends()) {
    const auto device = make_backend(name);
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        for (const int64_t column : {0, 7, 511, 599}) {
          for (const bool of_teacher : {false, true}) {
            const Tensor logits = random_tensor(*device, dtype, {2, kColumns}, 1),
                         teacher = random_tensor(*device, dtype, {2, kColumns}, 2);
            set_value(of_teacher ? teacher : logits, column, bad);
            const std::vector<double> found = distilled(*device, logits, teacher, {3, 5}, {1.0, 1.0});
            EXPECT_FALSE(std::isfinite(found[0])) << name << dtype << ' ' << bad << ' ' << column << of_teacher;
            EXPECT_TRUE(std::isfinite(found[1]));
          }
        }
      }
    }
  }
}

TEST(KernelTable, EveryKernelHasACase) {
  std::set<std::string> covered;
  for (const KernelCase& c : kernel_cases()) covered.insert(c.kernel);
  for (const std::string& kernel : kernel_names()) EXPECT_TRUE(covered.count(kernel)) << kernel << " is not compared with the reference";
}

}  // namespace mantissa::test::kernels_test
