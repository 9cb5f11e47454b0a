// Products of quantized operands against the fp64 product of their dequantized values, which is exact: every element is a dyadic rational
// and fp64 sums of this length lose less than the bound by far.
#include <cmath>

#include "backend/cpu/fast/gemm/packed_gemm.h"
#include "exact_gemm.h"
#include "kernel_backends.h"
#include "kernel_cases_quantized.h"

namespace mantissa::test::quantized_gemm_test {

class QuantizedGemm : public OnAllBackends {
 protected:
  Backend& fast() const { return *tested().front(); }  // that of the CPU, which makes the operands
  static constexpr Quantization kRows{Format::e4m3, 1, 32}, kTiles{Format::e4m3, 32, 32};

  QuantizedTensor random_codes(Shape shape, const Quantization& how, uint32_t what, int spread = 2, double scale = 1.0) {
    std::vector<double> drawn = wide_values(shape[0], shape[1], what, spread);
    for (double& value : drawn) value *= scale;
    return quantized(tensor_of(fast(), Dtype::bf16, shape, drawn), how);
  }

  // A bound that fp32 sums of either order stay within.
  static double bound(int64_t depth) { return 1e-6 * std::max(1.0, static_cast<double>(depth) / 4096); }
  void expect_gemm(const Operand& a, const Operand& b, Dtype out) {
    for (Backend* device : devices()) {
      const Gemm gemm{.a = on(*device, a), .b = on(*device, b), .out = empty(*device, out, {a.rows(), b.cols()}), .accumulate = false};
      device->run(gemm);
      SCOPED_TRACE(device->name());
      expect_exact(gemm, {}, bound(a.cols()));
    }
  }
  // Like expect_gemm(), for a grouped GEMM of one group.
  void expect_grouped_gemm(const Operand& a, const Operand& b) {
    for (Backend* device : tested()) {
      const GroupedGemm gemm{.a = on(*device, a),
                             .b = on(*device, b),
                             .out = empty(*device, Dtype::f32, {a.rows(), b.cols()}),
                             .offsets = tensor_of(*device, Dtype::i32, {2}, {0, static_cast<double>(a.rows())})};
      device->run(gemm);
      expect_exact(gemm, bound(a.cols()));
    }
  }

  static Operand on(Backend& device, const Operand& of) { return {copied(device, of.value), of.transposed}; }
};

TEST_F(QuantizedGemm, EqualsTheExactGemmInAllThreeRoles) {
  for (const int64_t block : {32, 128}) {
    const int64_t tokens = 2 * block, in = 2 * block, out = block;
    for (const Format format : {Format::e4m3, Format::e5m2}) {
      const Quantization rows{format, 1, block}, columns = rows.transposed(), tiles{format, block, block};
      const QuantizedTensor x = random_codes({tokens, in}, rows, 1), dy = random_codes({tokens, out}, rows, 2);
      const QuantizedTensor x_columns = random_codes({tokens, in}, columns, 1), dy_columns = random_codes({tokens, out}, columns, 2);
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        for (const Quantization& how : {rows, tiles}) {
          expect_gemm({x}, {random_codes({out, in}, how, 3), true}, dtype);          // fprop
          expect_gemm({dy}, {random_codes({out, in}, how.transposed(), 3)}, dtype);  // dgrad
        }
        expect_gemm({dy_columns, true}, {x_columns}, dtype);  // wgrad
      }
    }
  }
}

TEST_F(QuantizedGemm, TakesOneOperandInHighPrecision) {
  const QuantizedTensor weight = random_codes({96, 64}, kTiles, 4),
                        fake = random_codes({96, 64}, {Format::e2m1, 1, 32, ScaleRule::flashinfer}, 5);
  for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
    const Tensor x = tensor_of(fast(), dtype, {37, 64}, random_values(37 * 64, 6)),
                 dy = tensor_of(fast(), dtype, {37, 96}, random_values(37 * 96, 7));
    for (const QuantizedTensor& w : {weight, fake}) {
      expect_gemm({x}, {w, true}, dtype);
      expect_gemm({dy}, {w}, dtype);
    }
  }
}

TEST_F(QuantizedGemm, HoldsTheBoundForLongSums) {
  const Quantization columns = kRows.transposed();
  for (const int64_t depth : {4096, 16384}) {
    expect_gemm({random_codes({32, depth}, kRows, 8, 0)}, {random_codes({32, depth}, kRows, 9, 0), true}, Dtype::f32);      // fprop
    expect_gemm({random_codes({32, depth}, kRows, 8, 0)}, {random_codes({depth, 32}, kTiles, 9, 0)}, Dtype::f32);           // dgrad
    expect_gemm({random_codes({depth, 32}, columns, 8, 0), true}, {random_codes({depth, 32}, columns, 9, 0)}, Dtype::f32);  // wgrad
  }
}

// bf16 GEMMs flush subnormals: at these scales the operands' small elements are subnormal, or the largest overflow. Without a bf16 dot
// GEMM all run in fp32, and none because of its scales.
TEST_F(QuantizedGemm, MultipliesExtremeScalesInFp32) {
  const Quantization columns = kRows.transposed();
  for (const double scale : {0x1p-125, 0x1p-115, 0x1p+118}) {
    const auto a = [&](Shape shape, const Quantization& how) { return random_codes(shape, how, 10, 0, scale); };
    const auto b = [&](Shape shape, const Quantization& how) { return random_codes(shape, how, 11, 0, 1.0 / scale); };
    const int64_t before = fast().fp32_gemms();
    expect_gemm({a({32, 64}, kRows)}, {b({64, 64}, kTiles), true}, Dtype::f32);     // fprop
    expect_gemm({a({32, 64}, kRows)}, {b({64, 64}, columns)}, Dtype::f32);          // dgrad
    expect_gemm({a({64, 32}, columns), true}, {b({64, 64}, columns)}, Dtype::f32);  // wgrad
    EXPECT_EQ(fast().fp32_gemms() - before, onednn_has_bf16() ? 3 : 0) << scale;
  }
  const int64_t before = fast().fp32_gemms();
  expect_gemm({random_codes({32, 64}, kRows, 12)}, {random_codes({64, 64}, kTiles, 13), true}, Dtype::f32);
  EXPECT_EQ(fast().fp32_gemms(), before) << "ordinary scales need no fp32";
}

// The bound of extreme scales relies on subnormals: every element of one operand is one, in GEMMs of few rows, of many and of a group.
TEST_F(QuantizedGemm, HonorsSubnormalsOfExtremeScales) {
  const Quantization columns = kRows.transposed();
  const auto tiny = [&](Shape shape, const Quantization& how) { return random_codes(shape, how, 21, 0, 0x1p-128); };
  const auto large = [&](Shape shape, const Quantization& how) { return random_codes(shape, how, 22, 0, 0x1p+100); };
  for (const double x : exact_values(tiny({32, 64}, kRows))) ASSERT_LT(std::abs(x), 0x1p-126);
  for (const int64_t rows : {8, 64, 200}) {
    const Tensor dense = random_tensor(fast(), Dtype::f32, {rows, 64}, 23, 0x1p+100);
    expect_gemm({tiny({rows, 64}, kRows)}, {large({96, 64}, kTiles), true}, Dtype::f32);
    expect_gemm({large({rows, 64}, kRows)}, {tiny({96, 64}, kTiles), true}, Dtype::f32);
    expect_gemm({dense}, {tiny({64, 96}, columns)}, Dtype::f32);
    expect_grouped_gemm({tiny({rows, 64}, kRows)}, {large({96, 64}, kTiles), true});
    expect_grouped_gemm({dense}, {tiny({64, 96}, columns)});
  }
  expect_gemm({tiny({64, 96}, columns), true}, {large({64, 32}, columns)}, Dtype::f32);
}

TEST_F(QuantizedGemm, ZeroBlocksAreNotExtreme) {
  const QuantizedTensor a = random_codes({64, 64}, kRows, 14);
  for (const Tensor& part : {a.codes, a.scales}) fast().run(Fill{.out = part.slice(0, 32), .value = 0.0});
  const int64_t before = fast().fp32_gemms();
  expect_gemm({a}, {random_codes({32, 64}, kTiles, 15), true}, Dtype::f32);
  EXPECT_EQ(fast().fp32_gemms(), before);
}

// A large weight is dequantized in row blocks of output columns: never whole, and without a trace in the result.
TEST_F(QuantizedGemm, DequantizesALargeWeightInColumnBlocksWithTheBitsOfTheWhole) {
  const int64_t out = 3072, in = 2304, tokens = 64;
  const QuantizedTensor weight = random_codes({out, in}, kTiles, 19);
  const Tensor whole = empty(fast(), Dtype::bf16, {out, in});
  fast().run(Dequantize{.x = weight, .out = whole});
  for (const bool fprop : {true, false}) {
    const Tensor x = tensor_of(fast(), Dtype::bf16, {tokens, fprop ? in : out}, random_values(tokens * (fprop ? in : out), 20));
    const Tensor expected = empty(fast(), Dtype::f32, {tokens, fprop ? out : in}), actual = empty_like(expected);
    fast().run(Gemm{.a = {x}, .b = {whole, fprop}, .out = expected, .accumulate = false});
    const std::unique_ptr<Backend> fresh = make_backend("cpu");
    const QuantizedTensor codes = copied(*fresh, weight);
    const Tensor input = copied(*fresh, x), product = empty(*fresh, Dtype::f32, expected.shape());
    const int64_t before = fresh->allocator_stats().in_use;
    fresh->run(Gemm{.a = {input}, .b = {codes, fprop}, .out = product, .accumulate = false});
    EXPECT_TRUE(same_elements(values(product), values(expected)));
    EXPECT_LT(fresh->allocator_stats().peak_in_use - before, whole.bytes()) << (fprop ? "fprop" : "dgrad");
  }
}

TEST_F(QuantizedGemm, FindsAnExtremeScaleInTheLastColumnBlock) {
  const QuantizedTensor weight = random_codes({3072, 2304}, kTiles, 24);
  set_value(weight.scales, weight.scales.elements() - 1, 1);  // 2^-126
  const int64_t before = fast().fp32_gemms();
  expect_gemm({random_codes({4, 2304}, kRows, 25)}, {weight, true}, Dtype::f32);
  EXPECT_EQ(fast().fp32_gemms() - before, onednn_has_bf16() ? 1 : 0);
}

TEST_F(QuantizedGemm, AccumulatesIntoGradients) {
  for (const double scale : {1.0, 0x1p-120}) {  // the second a GEMM that starts over in fp32: it is added once
    const QuantizedTensor a = random_codes({32, 96}, kRows.transposed(), 16, 2, scale),
                          b = random_codes({32, 64}, kRows.transposed(), 17, 2, 1.0 / scale);
    for (Backend* device : devices()) {
      const Tensor once = empty(*device, Dtype::f32, {96, 64}),
                   twice = tensor_of(*device, Dtype::f32, {96, 64}, random_values(96 * 64, 18));
      const std::vector<double> before = values(twice);
      const Operand left = on(*device, {a, true}), right = on(*device, {b});
      device->run(Gemm{.a = left, .b = right, .out = once, .accumulate = false});
      device->run(Gemm{.a = left, .b = right, .out = twice, .accumulate = true});
      const std::vector<double> product = values(once), sum = values(twice);
      for (size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(sum[i], before[i] + product[i], 1e-4);
    }
  }
}

}  // namespace mantissa::test::quantized_gemm_test
