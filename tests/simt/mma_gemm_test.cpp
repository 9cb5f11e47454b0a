// GEMMs on tensor cores by our kernels: in every orientation, of values and of codes, of groups of any size.
#include <cstdlib>

#include "exact_gemm.h"
#include "kernel_operands.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
static void PrintTo(GemmPath path, std::ostream* out) { *out << gemm_path_name(path); }
}  // namespace mantissa

namespace mantissa::test::mma_gemm_test {

class MmaGemm : public ::testing::Test {
 protected:
  Backend& device() {
    if (!device_) device_ = make_backend("cuda");
    return *device_;
  }
  // Expects the GEMM to take this path, and returns its result.
  std::vector<double> run(const Gemm& k) { return run(k, route_gemm(form_of(k), device().gemm_device()).path); }
  template <class Kernel>
  std::vector<double> run(const Kernel& k, GemmPath path) {
    const auto count = [&] { return device().gemm_counts()[static_cast<size_t>(path)]; };
    const int64_t before = count();
    device().run(k);
    EXPECT_EQ(count(), before + 1);
    return values(k.out);
  }
  double bound_of(const Gemm& k) { return route_gemm(form_of(k), device().gemm_device()).bound; }
  double bound_of(const auto& k) { return route_grouped_gemm(form_of(k), device().gemm_device()).bound; }
  Tensor offsets_of(Operands& o, const std::vector<int64_t>& sizes) {
    std::vector<double> offsets = {0};
    for (const int64_t size : sizes) offsets.push_back(offsets.back() + static_cast<double>(size));
    return o.given(Dtype::i32, {std::ssize(offsets)}, offsets);
  }

 private:
  std::unique_ptr<Backend> device_;
};

// Groups of rows by our kernel, or by the library: one after the other where the host knows them, or all at once where it does not.
class GroupGemm : public MmaGemm, public ::testing::WithParamInterface<GemmPath> {
 protected:
  GroupGemm() {
    if (path() == GemmPath::mma) return;
    ::setenv("MANTISSA_SIMT_ARCHITECTURE", "90", 1);
    ::setenv("MANTISSA_SIMT_CUBLASLT_VERSION", "131000", 1);
  }
  ~GroupGemm() override {
    ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
    ::unsetenv("MANTISSA_SIMT_CUBLASLT_VERSION");
  }
  void SetUp() override {
    device().allow_grouped_gemms(path() == GemmPath::grouped);
    if (path() == GemmPath::bf16 && device().gemm_device().library == 0) GTEST_SKIP() << "there is no cuBLASLt";
    if (path() == GemmPath::grouped && !multiplies_groups(device().gemm_device())) GTEST_SKIP() << "cuBLASLt has no groups here";
  }
  GemmPath path() const { return GetParam(); }
  std::shared_ptr<const HostGroups> host_of(const std::vector<int64_t>& sizes, int64_t usual_rows = kRowsForLibrary) const {
    if (path() == GemmPath::mma) return nullptr;
    HostGroups out{.offsets = {0}, .usual_rows = usual_rows};
    if (path() == GemmPath::grouped) return std::make_shared<const HostGroups>(HostGroups{.offsets = {}, .usual_rows = usual_rows});
    for (const int64_t size : sizes) out.offsets.push_back(out.offsets.back() + size);
    return std::make_shared<const HostGroups>(std::move(out));
  }
};
INSTANTIATE_TEST_SUITE_P(By, GroupGemm, ::testing::Values(GemmPath::mma, GemmPath::bf16, GemmPath::grouped),
                         ::testing::PrintToStringParamName());

const std::vector<int64_t> kSizes = {0, 1, 127, 0, 130, 33, 128, 0};

TEST_P(GroupGemm, OfGroupsOfAnySizeIsTheirs) {
  for (const bool transposed : {false, true}) {
    for (const auto& [k, n] : {std::pair<int64_t, int64_t>{8, 8}, {40, 136}, {328, 24}}) {
      for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
        if (dtype == Dtype::f32 && transposed != (k == 40)) continue;
        SCOPED_TRACE(text(k, ", ", n, ' ', transposed, ' ', dtype));
        Operands o(device(), Dtype::bf16);
        const int64_t groups = std::ssize(kSizes), rows = 424;  // five of no group
        const GroupedGemm gemm{.a = {.value = o.input({rows, k})},
                               .b = {.value = o.input(transposed ? Shape{groups * n, k} : Shape{groups * k, n}), .transposed = transposed},
                               .out = o.output_of(dtype, "out", {rows, n}, kExact),
                               .offsets = offsets_of(o, kSizes),
                               .host = host_of(kSizes)};
        run(gemm, path());
        expect_exact(gemm, bound_of(gemm));
        o.expect_margins_untouched();
      }
    }
  }
}

TEST_P(GroupGemm, OfWeightsSumsTheRowsOfAGroup) {
  for (const bool accumulate : {false, true}) {
    Operands o(device(), Dtype::bf16);
    const int64_t groups = std::ssize(kSizes), rows = 424, m = 136, n = 24;
    const GroupedWeightGradient gemm{.a = o.input({rows, m}),
                                     .b = o.input({rows, n}),
                                     .out = o.gradient("dweight", {groups * m, n}, kExact, accumulate),
                                     .offsets = offsets_of(o, kSizes),
                                     .accumulate = accumulate,
                                     .host = host_of(kSizes)};
    const std::vector<double> before = values(gemm.out);
    run(gemm, path());
    expect_exact(gemm, before, bound_of(gemm));
    o.expect_margins_untouched();
  }
}

// A token has the same bits whichever tokens are beside it in its group, and however many.
TEST_P(GroupGemm, OfARowDoesNotDependOnItsGroup) {
  Operands o(device(), Dtype::bf16);
  const int64_t rows = path() == GemmPath::mma ? 200 : 4200, k = 72, n = 40;
  const Tensor a = o.input({rows, k}), one = o.input({n, k});
  std::vector<double> many;
  for (int i = 0; i < 3; ++i) {
    const std::vector<double> matrix = values(one);
    many.insert(many.end(), matrix.begin(), matrix.end());
  }
  const Tensor b = o.given(Dtype::bf16, {3 * n, k}, many);
  const auto with = [&](const std::vector<int64_t>& sizes) {
    return run(GroupedGemm{.a = {.value = a},
                           .b = {.value = b, .transposed = true},
                           .out = o.output_of(Dtype::f32, "out", {rows, n}, kExact),
                           .offsets = offsets_of(o, sizes),
                           .host = host_of(sizes)},
               path());
  };
  const std::vector<double> whole = with({0, rows, 0});
  EXPECT_EQ(with({1, rows - 70, 69}), whole);
  EXPECT_EQ(with({rows - 123, 0, 123}), whole);
}

// This is without the library, as on the executor; with it these are the library's GEMMs.
TEST_F(MmaGemm, OfTwoMatricesIsTheirs) {
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      for (const auto& [dtype, accumulate] : {std::pair{Dtype::bf16, false}, {Dtype::f32, false}, {Dtype::f32, true}}) {
        SCOPED_TRACE(text(a_transposed, b_transposed, ' ', dtype, ' ', accumulate));
        Operands o(device(), Dtype::bf16);
        // Sizes that no row in memory has are arbitrary.
        const int64_t m = a_transposed ? 136 : 131, n = b_transposed ? 37 : 136, k = a_transposed && !b_transposed ? 301 : 72;
        Gemm gemm{.a = {.value = o.input(a_transposed ? Shape{k, m} : Shape{m, k}), .transposed = a_transposed},
                  .b = {.value = o.input(b_transposed ? Shape{n, k} : Shape{k, n}), .transposed = b_transposed},
                  .out = accumulate ? o.gradient("out", {m, n}, kExact, true) : o.output_of(dtype, "out", {m, n}, kExact),
                  .accumulate = accumulate};
        if (dtype == Dtype::f32) gemm.bias = o.input({n});
        const std::vector<double> before = values(gemm.out);
        run(gemm);
        expect_exact(gemm, before, bound_of(gemm));
        o.expect_margins_untouched();
      }
    }
  }
}

// Codes of numbers times 2^exponent.
QuantizedTensor scaled_codes(Backend& device, Shape shape, uint32_t what, int exponent, const Quantization& how) {
  return quantized(random_tensor(device, Dtype::bf16, shape, what, std::ldexp(1.0, exponent)), how);
}

// Codes are multiplied as values, and in fp32 where bf16 does not hold these.
TEST_F(MmaGemm, OfTwoMatricesOfCodesIsThatOfTheirValues) {
  for (const int exponent : {0, 124}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(text(exponent, ' ', accumulate));
      Operands o(device(), Dtype::bf16);
      const Gemm gemm{.a = {.value = scaled_codes(device(), {64, 96}, 93, -exponent, rows_of(Format::e4m3, 32))},
                      .b = {.value = scaled_codes(device(), {32, 96}, 94, exponent, tiles_of(Format::e4m3, 32)), .transposed = true},
                      .out = accumulate ? o.gradient("out", {64, 32}, kExact, true) : o.output_of(Dtype::f32, "out", {64, 32}, kExact),
                      .accumulate = accumulate,
                      .bias = o.input({32})};
      const std::vector<double> before = values(gemm.out);
      const int64_t extreme = device().fp32_gemms();
      run(gemm);
      EXPECT_EQ(device().fp32_gemms(), extreme + (exponent == 0 ? 0 : 1));
      expect_exact(gemm, before, exponent == 0 ? bound_of(gemm) : 1e-6);
    }
  }
}

TEST_P(GroupGemm, OfCodesIsThatOfTheirValues) {
  const std::vector<int64_t> sizes = {32, 0, 96};
  for (const int exponent : {0, 124}) {
    SCOPED_TRACE(exponent);
    Operands o(device(), Dtype::bf16);
    const GroupedGemm gemm{.a = {.value = scaled_codes(device(), {128, 64}, 91, -exponent, rows_of(Format::e4m3, 32))},
                           .b = {.value = scaled_codes(device(), {288, 64}, 92, exponent, tiles_of(Format::e4m3, 32)), .transposed = true},
                           .out = o.output_of(Dtype::f32, "out", {128, 96}, kExact),
                           .offsets = offsets_of(o, sizes),
                           .host = host_of(sizes)};
    run(gemm, path());
    EXPECT_EQ(device().fp32_gemms(), exponent == 0 ? 0 : 1);
    expect_exact(gemm, exponent == 0 ? bound_of(gemm) : 1e-6);
  }
}

TEST_P(GroupGemm, OfCodesForWeightsIsThatOfTheirValues) {
  const std::vector<int64_t> sizes = {32, 0, 96};
  const Quantization how{Format::e4m3, 32, 1};
  for (const int exponent : {0, 124}) {
    for (const bool accumulate : {false, true}) {
      SCOPED_TRACE(text(exponent, ' ', accumulate));
      Operands o(device(), Dtype::bf16);
      const GroupedWeightGradient gemm{.a = scaled_codes(device(), {128, 64}, 95, -exponent, how),
                                       .b = scaled_codes(device(), {128, 96}, 96, exponent, how),
                                       .out = o.gradient("dw", {192, 96}, kExact, accumulate),
                                       .offsets = offsets_of(o, sizes),
                                       .accumulate = accumulate,
                                       .host = host_of(sizes)};
      const std::vector<double> before = values(gemm.out);
      const int64_t extreme = device().fp32_gemms();
      run(gemm, path());
      EXPECT_EQ(device().fp32_gemms(), extreme + (exponent == 0 ? 0 : 1));
      expect_exact(gemm, before, exponent == 0 ? bound_of(gemm) : 1e-6);
    }
  }
}

// The report of a lane about an index does not touch its counts.
TEST_F(MmaGemm, CountsOfExtremeScalesOutliveAnError) {
  const QuantizedTensor small = scaled_codes(device(), {32, 32}, 1, -124, {Format::e4m3, 1, 32}),
                        large = scaled_codes(device(), {32, 32}, 2, 120, {Format::e4m3, 1, 32});
  const auto multiply = [&] {
    device().run(Gemm{.a = {.value = small},
                      .b = {.value = large, .transposed = true},
                      .out = empty(device(), Dtype::f32, {32, 32}),
                      .accumulate = false});
  };
  multiply();
  const Tensor ids = tensor_of(device(), Dtype::i32, {1}, {7}), table = zeros(device(), Dtype::f32, {5, 4});
  device().run(EmbeddingForward{.ids = ids, .weight = table, .out = empty(device(), Dtype::f32, {1, 4})});
  EXPECT_THROW(device().synchronize(), Error);
  multiply();
  device().synchronize();
  EXPECT_EQ(device().fp32_gemms(), 2);
}

// Groups whose operands begin anywhere: a copy of them begins at 16 bytes.
class GroupsAnywhere : public MmaGemm {
 protected:
  void take(Dtype dtype, int64_t k, GemmPath path) {
    Operands o(device(), dtype, Operands::Memory::misaligned);
    run(GroupedGemm{.a = {.value = o.input({5, k})},
                    .b = {.value = o.input({2 * 8, k}), .transposed = true},
                    .out = o.output("out", {5, 8}, kExact),
                    .offsets = offsets_of(o, {2, 3})},
        path);
  }
};
TEST_F(GroupsAnywhere, AreOnTensorCores) { take(Dtype::bf16, 16, GemmPath::mma); }
TEST_F(GroupsAnywhere, ArePlainWhereRowsAreNotWhole16BytesAndInFp32) {
  take(Dtype::bf16, 12, GemmPath::plain);
  take(Dtype::f32, 16, GemmPath::plain);
}

}  // namespace mantissa::test::mma_gemm_test
