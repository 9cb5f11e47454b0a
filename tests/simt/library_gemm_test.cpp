// GEMMs that go to cuBLASLt on the chip that the executor stands for: they take the path of the table, and lie within its bound of the
// exact product.
#include <gmock/gmock.h>

#include <bit>
#include <cstdlib>

#include "backend/cuda/gemm/gemm_library.h"
#include "exact_gemm.h"
#include "failing_library.h"
#include "files.h"
#include "gpu/runtime.h"
#include "kernel_cases_quantized.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/log.h"
#include "mantissa/precision/config.h"
#include "mantissa/precision/operands.h"
#include "ops/ops.h"

namespace mantissa::test::library_gemm_test {

class LibraryGemm : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    ::setenv("MANTISSA_SIMT_ARCHITECTURE", std::to_string(GetParam()).c_str(), 1);
    device_ = make_backend("cuda");
  }
  void TearDown() override { ::unsetenv("MANTISSA_SIMT_ARCHITECTURE"); }
  Backend& device() { return *device_; }
  Backend& reference() { return *reference_; }

 private:
  std::unique_ptr<Backend> reference_ = make_backend("cpu_reference"), device_;
};

struct Sizes {
  int64_t m, n, k;
};

// Operands of the form that a recipe chooses, on any backend; `spread` is that of their magnitudes.
Operand operand_of(Operands& o, const Quantization& codes, Dtype compute, int64_t rows, int64_t cols, bool transposed, int spread) {
  if (codes) return {.value = quantized_input(o, rows, cols, codes, spread), .transposed = transposed};
  return {.value = o.given(compute, {rows, cols}, wide_values(rows, cols, 80, spread)), .transposed = transposed};
}

Gemm gemm_of(Operands& o, const Recipe& recipe, GemmRole role, const Sizes& s, int spread) {
  const auto operands = choose_operands(recipe, role);
  const Quantization first = codes_read(recipe, operands.first, role), second = codes_read(recipe, operands.second, role);
  const bool wgrad = role == GemmRole::wgrad, fprop = role == GemmRole::fprop;
  return {.a = operand_of(o, first, recipe.compute, wgrad ? s.k : s.m, wgrad ? s.m : s.k, wgrad, spread),
          .b = operand_of(o, second, recipe.compute, fprop ? s.n : s.k, fprop ? s.k : s.n, fprop, spread),
          .out = wgrad ? o.gradient("dweight", {s.m, s.n}, kExact, true) : o.output_of(recipe.compute, "out", {s.m, s.n}, kExact),
          .accumulate = wgrad};
}

int64_t count_of(const Backend& device, GemmPath path) { return device.gemm_counts()[static_cast<size_t>(path)]; }

TEST_P(LibraryGemm, OfEachRecipeTakesItsPath) {
  const int arch = GetParam();
  for (const std::string& preset : preset_names()) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      const Recipe recipe = preset_recipe(preset, dtype);
      for (const GemmRole role : kGemmRoles) {
        for (const Sizes& s : {Sizes{128, 128, 128}, recipe.block() == 128 ? Sizes{144, 128, 640} : Sizes{144, 160, 96}}) {
          if (dtype == Dtype::f32 && s.m == 128) continue;
          SCOPED_TRACE(text(preset, ' ', dtype, ' ', gemm_name(role), ' ', s.m, 'x', s.n, 'x', s.k));
          Operands o(device(), dtype);
          const Gemm gemm = gemm_of(o, recipe, role, s, 6);
          const GemmRoute route = route_gemm(form_of(gemm), device().gemm_device());
          const std::vector<double> before = values(gemm.out);
          const int64_t taken = count_of(device(), route.path);
          device().run(gemm);
          device().synchronize();
          EXPECT_NE(route.path, GemmPath::plain);
          EXPECT_EQ(count_of(device(), route.path), taken + 1);
          const bool mx = preset == "mxfp8" || preset == "mxfp8_te" || (preset == "mxfp4_qat_mxfp8_act" && role != GemmRole::dgrad) ||
                          ((preset == "mxfp4_qat_mxfp4_act" || preset == "nvfp4_qat_nvfp4_act") && role == GemmRole::fprop);
          EXPECT_EQ(is_native(route.path), (arch == 90 && preset == "fp8_block") || (arch >= 100 && mx));
          expect_exact(gemm, before, route.bound);
          o.expect_margins_untouched();
        }
      }
    }
  }
}

// Nobody promises that operands are aligned or sizes round.
TEST_P(LibraryGemm, OfAnySizeAndAlignmentIsThatOfTheReference) {
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{3, 5, 7}, Sizes{33, 70, 65}, Sizes{64, 130, 1}, Sizes{0, 4, 8}, Sizes{4, 4, 0}}) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
      for (int variant = 0; variant < 8; ++variant) {
        const bool ta = (variant & 1) != 0, tb = (variant & 2) != 0, aligned = (variant & 4) == 0, biased = (ta != tb) == aligned;
        SCOPED_TRACE(text(s.m, 'x', s.n, 'x', s.k, ' ', dtype, biased ? " bias " : " ", variant));
        Operands o(device(), dtype, aligned ? Operands::Memory::aligned : Operands::Memory::misaligned);
        const Gemm gemm{.a = {.value = o.input(ta ? Shape{s.k, s.m} : Shape{s.m, s.k}), .transposed = ta},
                        .b = {.value = o.input(tb ? Shape{s.n, s.k} : Shape{s.k, s.n}), .transposed = tb},
                        .out = o.output("out", {s.m, s.n}, kExact),
                        .accumulate = false,
                        .bias = biased ? o.input({s.n}) : Tensor()};
        device().run(gemm);
        device().synchronize();
        expect_exact(gemm, {}, route_gemm(form_of(gemm), device().gemm_device()).bound);
        o.expect_margins_untouched();
      }
    }
  }
}

// Sums that the library adds, and those it cannot: with a bias of another dtype, or at any address, and both with extreme scales.
TEST_P(LibraryGemm, AddsABiasToWhatIsAccumulated) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    for (const Operands::Memory memory : {Operands::Memory::aligned, Operands::Memory::misaligned}) {
      for (const int exponent : {0, 124}) {
        SCOPED_TRACE(text(dtype, ' ', exponent));
        device().allow_native_gemms(exponent == 0);
        Operands o(device(), dtype, memory);
        const auto codes = [&](uint32_t what, int scale) {
          std::vector<double> from = wide_values(64, 64, what, 0);
          for (double& value : from) value = std::ldexp(value, scale);
          return quantized(tensor_of(device(), Dtype::bf16, {64, 64}, from), rows_of(Format::e4m3, 32));
        };
        const Gemm gemm{.a = {.value = codes(83, -exponent)},
                        .b = {.value = codes(84, exponent), .transposed = true},
                        .out = o.gradient("sum", {64, 64}, kExact, true),
                        .accumulate = true,
                        .bias = o.input_of(dtype, {64})};
        const std::vector<double> before = values(gemm.out);
        device().run(gemm);
        device().synchronize();
        expect_exact(gemm, before, exponent == 0 ? route_gemm(form_of(gemm), device().gemm_device()).bound : 1e-6);
      }
    }
  }
}

// Activations are fp32 with biases: codes with an fp32 output and bias.
TEST_P(LibraryGemm, OfCodesAddsABiasOfAnyDtype) {
  for (const Dtype out : {Dtype::bf16, Dtype::f32}) {
    for (const Dtype bias : {Dtype::bf16, Dtype::f32}) {
      SCOPED_TRACE(text(bias, " to ", out));
      Operands o(device(), Dtype::bf16);
      const int64_t block = GetParam() == 90 ? 128 : 32;
      const Gemm gemm{.a = {.value = quantized_input(o, 64, 128, rows_of(Format::e4m3, block), 6)},
                      .b = {.value = quantized_input(o, 128, 128, tiles_of(Format::e4m3, block), 6), .transposed = true},
                      .out = o.output_of(out, "out", {64, 128}, kExact),
                      .accumulate = false,
                      .bias = o.input_of(bias, {128})};
      device().run(gemm);
      device().synchronize();
      expect_exact(gemm, {}, route_gemm(form_of(gemm), device().gemm_device()).bound);
    }
  }
}

// A block across the contraction has one scale for all of its rows or columns.
TEST_P(LibraryGemm, OfBlocksAcrossTheContractionIsThatOfValues) {
  for (const int64_t block : {32, 128}) {
    Operands o(device(), Dtype::bf16);
    const Quantization rows = rows_of(Format::e4m3, block);
    const Gemm gemm{.a = {.value = quantized_input(o, 128, 128, rows, 6), .transposed = true},
                    .b = {.value = quantized_input(o, 128, 128, rows, 6)},
                    .out = o.output_of(Dtype::f32, "out", {128, 128}, kExact),
                    .accumulate = false};
    const GemmRoute route = route_gemm(form_of(gemm), device().gemm_device());
    EXPECT_FALSE(is_native(route.path));
    device().run(gemm);
    device().synchronize();
    expect_exact(gemm, {}, route.bound);
  }
}

// bf16 does not hold 2^-127 of a block times its element; fp32 does.
TEST_P(LibraryGemm, OfExtremeScalesIsThatOfFp32) {
  for (const Quantization& how : {rows_of(Format::e4m3, 32), tiles_of(Format::e4m3, 128)}) {
    for (const bool native : {false, true}) {
      for (const bool accumulate : {false, true}) {
        for (const int exponent : {124, 20}) {
          SCOPED_TRACE(text(how, native ? ", native " : " ", accumulate, ' ', exponent));
          device().allow_native_gemms(native);
          Operands o(device(), Dtype::bf16);
          const auto codes = [&](const Quantization& by, uint32_t what, int scale) {
            std::vector<double> from = wide_values(128, 128, what, 0);
            for (double& value : from) value = std::ldexp(value, scale);
            return quantized(tensor_of(device(), Dtype::bf16, {128, 128}, from), by);
          };
          const Gemm gemm{
              .a = {.value = codes(rows_of(Format::e4m3, how.block()), 81, -exponent)},
              .b = {.value = codes(how, 82, exponent - 10), .transposed = true},
              .out = accumulate ? o.gradient("sum", {128, 128}, kExact, true) : o.output_of(Dtype::f32, "out", {128, 128}, kExact),
              .accumulate = accumulate};
          const std::vector<double> before = values(gemm.out);
          const int64_t extreme = device().fp32_gemms();
          device().run(gemm);
          device().synchronize();
          EXPECT_EQ(device().fp32_gemms(),
                    extreme + (exponent == 124 && !is_native(route_gemm(form_of(gemm), device().gemm_device()).path)));
          EXPECT_EQ(is_native(route_gemm(form_of(gemm), device().gemm_device()).path),
                    native && (how.block() == 32 ? GetParam() >= 100 : GetParam() == 90));
          expect_exact(gemm, before, 1e-6);
        }
      }
    }
  }
}

// E2M1 codes are written as E4M3 codes of the same values: rows of all codes at every scale that leaves them finite, times one. Their own
// blocks may be longer.
TEST_P(LibraryGemm, OfE2m1CodesHasTheirValues) {
  for (const int64_t block : {32, 64}) {
    SCOPED_TRACE(block);
    Operands o(device(), Dtype::bf16);
    constexpr int64_t kRows = 256, kDepth = 128;
    const Quantization how{Format::e2m1, 1, block, ScaleRule::flashinfer};
    const QuantizedTensor codes = empty_quantized(device(), {kRows, kDepth}, how);
    std::vector<uint8_t> bytes, scales;
    for (int64_t i = 0; i < codes.codes.elements(); ++i) bytes.push_back(static_cast<uint8_t>(i * 2 % 16 | (i * 2 + 1) % 16 << 4));
    for (int64_t i = 0; i < codes.scales.elements(); ++i) scales.push_back(static_cast<uint8_t>(i * block / 32 % 253));
    device().upload(bytes.data(), codes.codes), device().upload(scales.data(), codes.scales);
    std::vector<double> ones(kDepth * kDepth);
    for (size_t i = 0; i < kDepth; ++i) ones[i * kDepth + i] = 1.0;
    const Gemm gemm{.a = {.value = quantized(o.given(Dtype::bf16, {kDepth, kDepth}, ones), rows_of(Format::e4m3, 32))},
                    .b = {.value = codes, .transposed = true},
                    .out = o.output_of(Dtype::f32, "out", {kDepth, kRows}, kExact),
                    .accumulate = false};
    const GemmRoute route = route_gemm(form_of(gemm), device().gemm_device());
    EXPECT_EQ(std::pair(route.path, route.widened), GetParam() >= 100 ? std::pair(GemmPath::mxfp8, 1) : std::pair(GemmPath::bf16, 0));
    device().run(gemm);
    device().synchronize();
    const std::vector<double> found = transposed(values(gemm.out), kRows);
    for (int64_t i = 0; i < kRows * kDepth; ++i) {
      const uint8_t scale = scales[static_cast<size_t>(i / block)], code = static_cast<uint8_t>(i % 16);
      ASSERT_EQ(found[static_cast<size_t>(i)], std::bit_cast<float>(decode_in_block<E2M1>(code, scale, how.rule))) << i;
    }
  }
}

// The scales of both tensors are a factor of the product, and not of what it is added to. Operands are the library's only where it takes
// their sizes.
TEST_P(LibraryGemm, OfNvfp4CodesHasTheirValues) {
  const auto how = [](int8_t exponent) { return Quantization{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, exponent}; };
  for (const auto& [m, n, k, first, second] : {std::tuple<int64_t, int64_t, int64_t, int8_t, int8_t>{48, 144, 352, -8, -2},
                                               {32, 16, 64, 60, 30},
                                               {16, 32, 32, -60, -3},
                                               {32, 32, 48, 5, 5},
                                               {24, 32, 64, 5, 5}}) {
    for (const bool accumulate : {false, true}) {
      for (const Dtype out : {Dtype::bf16, Dtype::f32}) {
        if (accumulate && out == Dtype::bf16) continue;
        SCOPED_TRACE(text(m, 'x', n, 'x', k, " 2^", int{first}, ' ', out));
        Operands o(device(), Dtype::bf16);
        const auto codes = [&](int64_t rows, int8_t exponent) {
          std::vector<double> from = wide_values(rows, k, 81, 2);
          for (double& value : from) value = std::ldexp(value, exponent + 2);
          return quantized(tensor_of(device(), Dtype::bf16, {rows, k}, from), how(exponent));
        };
        const Gemm gemm{.a = {.value = codes(m, first)},
                        .b = {.value = codes(n, second), .transposed = true},
                        .out = accumulate ? o.gradient("sum", {m, n}, kExact, true) : o.output_of(out, "out", {m, n}, kExact),
                        .accumulate = accumulate,
                        .bias = accumulate ? Tensor() : o.input_of(out, {n})};
        const bool native = GetParam() >= 100 && k % 32 == 0 && m % 16 == 0;
        const GemmRoute route = route_gemm(form_of(gemm), device().gemm_device());
        EXPECT_EQ(route.path, native ? GemmPath::nvfp4 : GemmPath::bf16);
        const std::vector<double> before = values(gemm.out);
        const int64_t taken = count_of(device(), route.path), asked = simt::library_gemms().per_16;
        device().run(gemm);
        device().synchronize();
        EXPECT_EQ(count_of(device(), route.path), taken + 1);
        EXPECT_EQ(simt::library_gemms().per_16, asked + (native ? 1 : 0));
        expect_exact(gemm, before, route.bound);
        o.expect_margins_untouched();
      }
    }
  }
}

// The few blocks that wait for an extreme scale go on from tile to tile: 306 of them.
TEST_P(LibraryGemm, OfExtremeScalesHasMoreTilesThanBlocks) {
  device().allow_native_gemms(false);
  Operands o(device(), Dtype::bf16);
  const auto codes = [&](int64_t rows, uint32_t what, int scale) {
    std::vector<double> from = wide_values(rows, 32, what, 0);
    for (double& value : from) value = std::ldexp(value, scale);
    return quantized(tensor_of(device(), Dtype::bf16, {rows, 32}, from), rows_of(Format::e4m3, 32));
  };
  const Gemm gemm{.a = {.value = codes(17 * 64, 81, -124)},
                  .b = {.value = codes(18 * 64, 82, 114), .transposed = true},
                  .out = o.output_of(Dtype::f32, "out", {17 * 64, 18 * 64}, kExact),
                  .accumulate = false};
  const int64_t extreme = device().fp32_gemms();
  device().run(gemm);
  device().synchronize();
  EXPECT_EQ(device().fp32_gemms(), extreme + 1);
  expect_exact(gemm, {}, 1e-6);
}

TEST_P(LibraryGemm, IsThePlainOneWhereTheLibraryHasNone) {
  const int64_t plain = count_of(device(), GemmPath::plain);
  Operands o(device(), Dtype::bf16);
  device().run(
      Gemm{.a = {.value = o.input({3, 0})}, .b = {.value = o.input({0, 4})}, .out = o.output("out", {3, 4}, kExact), .accumulate = false});
  EXPECT_EQ(count_of(device(), GemmPath::plain), plain + 1);
  EXPECT_EQ(values(o.results()[0].tensor), std::vector<double>(12));
}

// The library multiplies as values what it has no algorithm for as codes, and the log reports it once.
TEST_P(LibraryGemm, OfCodesThatAreRefusedIsThatOfTheirValues) {
  const int64_t block = GetParam() == 90 ? 128 : 32;
  Operands o(device(), Dtype::bf16);
  const auto gemm_of_rows = [&](int64_t rows) {
    return Gemm{.a = {.value = quantized_input(o, rows, 256, rows_of(Format::e4m3, block), 6)},
                .b = {.value = quantized_input(o, 128, 256, tiles_of(Format::e4m3, block), 6), .transposed = true},
                .out = o.output_of(Dtype::f32, "out", {rows, 128}, kExact),
                .accumulate = false};
  };
  const Gemm gemm = gemm_of_rows(64), larger = gemm_of_rows(80);
  const GemmRoute route = route_gemm(form_of(gemm), device().gemm_device());
  const TemporaryFolder folder;
  open_log({.console = false, .file = folder / "log.txt"});
  simt::refuses_codes() = true;
  for (const Gemm& each : {gemm, larger, gemm}) device().run(each);
  device().synchronize();
  EXPECT_EQ(count_of(device(), GemmPath::bf16), 3);
  simt::refuses_codes() = false;
  const int64_t taken = count_of(device(), route.path);
  device().run(gemm_of_rows(96));
  EXPECT_EQ(count_of(device(), route.path), taken + 1) << "others are asked for as they were";
  device().run(gemm);
  EXPECT_EQ(count_of(device(), GemmPath::bf16), is_native(route.path) ? 4 : 5) << "it stays refused";
  close_log();
  const std::string log = read_file(folder / "log.txt");
  GemmDevice emulating = device().gemm_device();
  emulating.native = false;
  expect_exact(gemm, {}, route_gemm(form_of(gemm), emulating).bound);
  const std::string told = "no algorithm for e4m3";
  EXPECT_EQ(log.find(told) != std::string::npos, is_native(route.path)) << log;
  EXPECT_EQ(log.find(told), log.rfind(told)) << log;
}

// An algorithm may be missing for sums that add to what is there, or for those with a bias, alone.
TEST_P(LibraryGemm, OfCodesThatAreRefusedLeavesOthersOfItsForm) {
  struct Variant {
    bool adds, biased;
  };
  const int64_t block = GetParam() == 90 ? 128 : 32;
  const auto expect_apart = [&](const Variant& refused, const Variant& other) {
    SCOPED_TRACE(text(refused.adds, refused.biased, ' ', other.adds, other.biased));
    const auto device = make_backend("cuda");
    Operands o(*device, Dtype::bf16);
    const Dtype out = refused.biased || other.biased ? Dtype::bf16 : Dtype::f32;
    const Operand a{.value = quantized_input(o, 64, 256, rows_of(Format::e4m3, block), 6)};
    const Operand b{.value = quantized_input(o, 128, 256, tiles_of(Format::e4m3, block), 6), .transposed = true};
    const Tensor bias = o.input_of(Dtype::bf16, {128});
    GemmPath path{};
    const auto native = [&](const Variant& of) {
      const Gemm gemm{.a = a, .b = b, .out = zeros(*device, out, {64, 128}), .accumulate = of.adds, .bias = of.biased ? bias : Tensor()};
      path = route_gemm(form_of(gemm), device->gemm_device()).path;
      const int64_t before = count_of(*device, path);
      device->run(gemm);
      device->synchronize();
      return count_of(*device, path) - before;
    };
    simt::refuses_codes() = true;
    const int64_t taken = native(refused);
    simt::refuses_codes() = false;
    if (!is_native(path)) return;
    EXPECT_EQ(taken, 0);
    EXPECT_EQ(native(other), 1);
    EXPECT_EQ(native(refused), 0);
  };
  const Variant plain{}, adds{.adds = true, .biased = false}, biased{.adds = false, .biased = true};
  expect_apart(adds, plain);
  expect_apart(plain, adds);
  expect_apart(biased, plain);
  expect_apart(plain, biased);
}

// An algorithm that loads 16 bytes at once fails at other addresses.
TEST_P(LibraryGemm, HasAnAlgorithmForEachAlignment) {
  const auto library = gpu::load_gemm_library();
  const auto stream = gpu::make_stream();
  constexpr int64_t kSize = 32, kBytes = kSize * kSize * 4;
  const Tensor memory = zeros(device(), Dtype::f32, {3 * kSize * kSize + 4});
  device().synchronize();
  const auto workspace = [](int64_t bytes) { return std::shared_ptr<std::byte>(gpu::take_memory(bytes), gpu::give_memory); };
  const auto algorithms_for = [&](int64_t offset, uint32_t alignment) {
    const auto at = [&](int64_t matrix) { return memory.device_bytes() + matrix * kBytes + offset; };
    const int64_t before = simt::library_gemms().algorithms;
    EXPECT_TRUE(library->multiply(*stream,
                                  {.a = {.data = at(0), .dtype = Dtype::f32},
                                   .b = {.data = at(1), .dtype = Dtype::f32},
                                   .out = at(2),
                                   .out_dtype = Dtype::f32,
                                   .accumulate = false,
                                   .bias = nullptr,
                                   .m = kSize,
                                   .n = kSize,
                                   .k = kSize,
                                   .alignment = alignment},
                                  workspace));
    gpu::drain(*stream);
    return simt::library_gemms().algorithms - before;
  };
  EXPECT_EQ(algorithms_for(0, 16), 1);
  EXPECT_EQ(algorithms_for(4, 4), 1);
  EXPECT_EQ(algorithms_for(8, 4), 0);
  EXPECT_EQ(algorithms_for(0, 16), 0);
}

TEST(LibraryGemms, ThatFailSayWhetherThatIsOfTheEnvironment) {
  ::setenv("MANTISSA_SIMT_ARCHITECTURE", "90", 1);
  const auto device = make_backend("cuda");
  Operands o(*device, Dtype::bf16);
  const Gemm gemm{
      .a = {.value = o.input({16, 24})}, .b = {.value = o.input({24, 32})}, .out = o.output("out", {16, 32}, kExact), .accumulate = false};
  struct Case {
    int status;  // a cublasStatus_t
    ExitCode code;
    const char* text;
  };
  for (const Case& c :
       {Case{1, ExitCode::environment, "status 1"}, Case{3, ExitCode::environment, "no memory"}, Case{8, ExitCode::environment, "status 8"},
        Case{7, ExitCode::internal, "status 7"}, Case{13, ExitCode::internal, "a kernel failed"}}) {
    simt::status_of_gemms() = c.status;
    const Error error = error_of([&] { device->run(gemm); });
    EXPECT_EQ(error.code(), c.code) << c.text;
    EXPECT_THAT(error.what(), ::testing::HasSubstr(text("cuBLASLt: a GEMM of 16 x 32 x 24 failed: ", c.text)));
  }
  simt::status_of_gemms() = 0;
  device->run(gemm);
  device->synchronize();
  ::unsetenv("MANTISSA_SIMT_ARCHITECTURE");
}

// All groups take the algorithm of the usual one, and all calls.
TEST_P(LibraryGemm, OfGroupsHasOneAlgorithm) {
  Operands o(device(), Dtype::bf16);
  const Tensor a = o.input({200, 72}), b = o.input({3 * 40, 72});
  const auto with = [&](const std::vector<int64_t>& sizes, int64_t usual_rows, GemmPath path) {
    HostGroups host{.offsets = {0}, .usual_rows = usual_rows};
    for (const int64_t size : sizes) host.offsets.push_back(host.offsets.back() + size);
    const simt::LibraryGemms before = simt::library_gemms();
    const int64_t taken = count_of(device(), path);
    device().run(GroupedGemm{
        .a = {.value = a},
        .b = {.value = b, .transposed = true},
        .out = o.output_of(Dtype::f32, "out", {200, 40}, kExact),
        .offsets = o.given(Dtype::i32, {std::ssize(host.offsets)}, std::vector<double>(host.offsets.begin(), host.offsets.end())),
        .host = std::make_shared<const HostGroups>(host)});
    device().synchronize();
    EXPECT_EQ(count_of(device(), path), taken + 1);
    const simt::LibraryGemms after = simt::library_gemms();
    return std::vector{after.algorithms - before.algorithms, after.checks - before.checks, after.of_values - before.of_values};
  };
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(with({1, 130, 69}, 512, GemmPath::bf16), (Counts{1, 3, 3}));
  EXPECT_EQ(with({77, 0, 123}, 512, GemmPath::bf16), (Counts{0, 2, 2}));
  EXPECT_EQ(with({123, 77, 0}, 512, GemmPath::bf16), (Counts{0, 0, 2})) << "the library is asked once about so many rows";
  EXPECT_EQ(with({77, 0, 123}, 511, GemmPath::mma), (Counts{0, 0, 0}));
  // A group for which it is refused takes all of its call to our kernel, and no other call: a run that is resumed knows no earlier ones.
  simt::refused_columns() = 76;
  EXPECT_EQ(with({76, 0, 123}, 512, GemmPath::mma), (Counts{0, 1, 0}));
  simt::refused_columns() = 0;
  EXPECT_EQ(with({76, 0, 123}, 512, GemmPath::mma), (Counts{0, 0, 0})) << "which stays refused";
  EXPECT_EQ(with({78, 0, 122}, 512, GemmPath::bf16), (Counts{0, 2, 2}));
}

// Only the device knows the sizes of groups that are multiplied at once. Where the library refuses that, the host reads them.
TEST_P(LibraryGemm, OfGroupsAtOnceNeedsNoSizes) {
  ::setenv("MANTISSA_SIMT_CUBLASLT_VERSION", "131000", 1);
  device().allow_grouped_gemms(true);
  Operands o(device(), Dtype::bf16);
  const auto with = [&](int64_t columns, int64_t usual_rows, const std::vector<double>& offsets = {0, 77, 77, 197}) {
    const simt::LibraryGemms before = simt::library_gemms();
    const GroupedGemm gemm{.a = {.value = o.input({200, 72})},
                           .b = {.value = o.input({3 * columns, 72}), .transposed = true},
                           .out = o.output_of(Dtype::bf16, "out", {200, columns}, kExact),
                           .offsets = o.given(Dtype::i32, {4}, offsets),
                           .host = std::make_shared<const HostGroups>(HostGroups{.offsets = {}, .usual_rows = usual_rows})};
    device().run(gemm);
    device().synchronize();
    expect_exact(gemm, route_grouped_gemm(form_of(gemm), device().gemm_device(), usual_rows).bound);
    const simt::LibraryGemms after = simt::library_gemms();
    return std::pair(after.at_once - before.at_once, after.of_values - before.of_values);
  };
  const bool has = GetParam() != 80 && GetParam() != 120;
  const std::pair<int64_t, int64_t> at_once{1, 0}, one_by_one{0, 2}, ours{0, 0};
  EXPECT_EQ(with(40, 67), has ? at_once : ours);
  std::vector<Tensor> held;  // where sizes and addresses of the call before lay
  for (int i = 0; i < 8; ++i) held.push_back(zeros(device(), Dtype::u8, {72}));
  EXPECT_EQ(with(40, 67, {0, 33, 150, 197}), has ? at_once : ours);
  EXPECT_EQ(with(40, 512), has ? at_once : one_by_one);
  EXPECT_EQ(with(36, 512), one_by_one) << "rows of out are not whole 16 bytes";
  simt::refuses_groups() = true;
  EXPECT_EQ(with(48, 512), one_by_one);
  EXPECT_EQ(with(48, 67), ours);
  simt::refuses_groups() = false;
  ::setenv("MANTISSA_SIMT_CUBLASLT_VERSION", "130900", 1);
  EXPECT_EQ(with(56, 67), ours);
  ::unsetenv("MANTISSA_SIMT_CUBLASLT_VERSION");
}

// Sums of a group are whole, so that they do not depend on the rows of other groups, where the same product alone may be split.
TEST_P(LibraryGemm, OfAGroupIsNotThatOfTheSameSizesAlone) {
  for (const bool group_first : {true, false}) {
    SCOPED_TRACE(group_first);
    const auto device = make_backend("cuda");
    Operands o(*device, Dtype::bf16);
    const Tensor a = o.input({1100, 64}), b = o.input({1100, 72});
    const HostGroups host{.offsets = {0, 500, 1100}, .usual_rows = 512};
    const GroupedWeightGradient of_groups{.a = a,
                                          .b = b,
                                          .out = o.output_of(Dtype::f32, "out", {2 * 64, 72}, kExact),
                                          .offsets = o.given(Dtype::i32, {3}, {0, 500, 1100}),
                                          .accumulate = false,
                                          .host = std::make_shared<const HostGroups>(host)};
    const Gemm alone{.a = {.value = a.slice(0, 512), .transposed = true},
                     .b = {.value = b.slice(0, 512)},
                     .out = o.output_of(Dtype::f32, "alone", {64, 72}, kExact),
                     .accumulate = false};
    const auto algorithms_for = [&](bool groups) {
      const simt::LibraryGemms before = simt::library_gemms();
      groups ? device->run(of_groups) : device->run(alone);
      device->synchronize();
      const simt::LibraryGemms after = simt::library_gemms();
      EXPECT_EQ(after.of_values - before.of_values, groups ? 2 : 1);
      return after.algorithms - before.algorithms;
    };
    EXPECT_EQ(algorithms_for(group_first), 1);
    EXPECT_EQ(algorithms_for(!group_first), 1);
    EXPECT_EQ(algorithms_for(group_first), 0);
    expect_exact(alone, {}, route_gemm(form_of(alone), device->gemm_device()).bound);
  }
}

// Experts that usually have 512 rows or more are multiplied by the library, after the host has read once where their rows end.
TEST_P(LibraryGemm, OfExpertsWithManyRowsIsTheLibrarys) {
  const auto groups_of = [&](int64_t tokens, ExpertGradients gradients) {
    std::vector<int32_t> experts(static_cast<size_t>(tokens));
    for (size_t t = 0; t < experts.size(); ++t) experts[t] = t % 5 == 0 ? 1 : 0;
    return dispatch(from_host(device(), Dtype::i32, {tokens, 1}, experts.data()), 2, 32, 0, {}, gradients);
  };
  EXPECT_FALSE(groups_of(1022, ExpertGradients::summed).host) << "511 rows each";
  EXPECT_FALSE(groups_of(1100, ExpertGradients::by_source).host) << "layouts have the bits of one rank";
  ::setenv("MANTISSA_SIMT_CUBLASLT_VERSION", "131000", 1);
  device().allow_grouped_gemms(true);
  const Dispatch at_once = groups_of(1022, ExpertGradients::summed);
  EXPECT_EQ(at_once.host != nullptr, GetParam() == 90 || GetParam() == 100);
  if (at_once.host) {
    EXPECT_EQ(at_once.host->offsets, std::vector<int64_t>()) << "the host waited";
    EXPECT_EQ(at_once.host->usual_rows, 511);
  }
  EXPECT_FALSE(groups_of(1100, ExpertGradients::by_source).host);
  device().allow_grouped_gemms(false);
  ::unsetenv("MANTISSA_SIMT_CUBLASLT_VERSION");
  const Dispatch to = groups_of(1100, ExpertGradients::summed);
  ASSERT_TRUE(to.host);
  EXPECT_EQ(to.host->usual_rows, 550);
  EXPECT_EQ(std::vector<double>(to.host->offsets.begin(), to.host->offsets.end()), values(to.offsets));
  EXPECT_EQ(to.host->offsets, (std::vector<int64_t>{0, 896, 1120}));

  const Tensor x = random_tensor(device(), Dtype::bf16, {1100, 32}, 1), w = random_tensor(device(), Dtype::bf16, {2 * 64, 32}, 2);
  const Tensor weights = random_tensor(device(), Dtype::f32, {1100, 1}, 3);
  const auto inner = [&](Dispatch by, GemmPath path) {
    const int64_t before = count_of(device(), path);
    const Tensor out =
        dispatched_swiglu(Var(x), Var(weights), LinearWeight(w, {}, nullptr), Var(), by, {}, {.keep = Keep::value, .as_codes = true})
            .value();
    device().synchronize();
    EXPECT_EQ(count_of(device(), path), before + 1);
    return values(out.slice(0, 1120));
  };
  Dispatch unknown = to;
  unknown.host = nullptr;
  EXPECT_THAT(inner(to, GemmPath::bf16), ::testing::Pointwise(::testing::DoubleNear(0x1p-6), inner(unknown, GemmPath::mma)));
}

INSTANTIATE_TEST_SUITE_P(Chips, LibraryGemm, ::testing::Values(80, 90, 100, 120), [](const auto& c) { return text("sm_", c.param); });

}  // namespace mantissa::test::library_gemm_test
