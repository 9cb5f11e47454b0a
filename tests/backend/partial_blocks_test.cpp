// Matrices whose rows and columns end within a block, of random sizes: the last blocks have the scales of the elements that are there.
// Scales and codes are those of slow_quantize(), which goes element by element, on every backend.
#include "exact_gemm.h"
#include "gemm_shapes.h"
#include "quantized_matrices.h"
#include "slow_formats.h"

namespace mantissa::test::partial_blocks_test {

class PartialBlocks : public OnAllBackends {
 protected:
  static Tensor drawn(Backend& device, uint32_t number, int64_t rows, int64_t cols) {
    const std::vector<Distribution>& all = distributions();
    return drawn_matrix(device, all[number % all.size()], rows, cols);
  }
  static SlowQuantized expected(const Tensor& x, const Quantization& how) {
    return slow_quantize(slow(how.format), how.rule, values(x), static_cast<size_t>(x.dim(1)), static_cast<size_t>(how.block_rows),
                         static_cast<size_t>(how.block_cols));
  }
  // Expects scales, codes and values.
  static void expect_quantized(const QuantizedTensor& codes, const SlowQuantized& slow) {
    EXPECT_TRUE(same_elements(bytes_of(codes.scales), slow.scales));
    EXPECT_TRUE(same_elements(codes_of(codes), slow.codes));
    std::vector<double> numbers;
    for (const uint32_t bits : slow.values) numbers.push_back(value_of_bits(bits));
    const std::vector<double> found = values(dequantized(codes));
    ASSERT_EQ(found.size(), numbers.size());
    for (size_t i = 0; i < found.size(); ++i)
      ASSERT_TRUE(found[i] == numbers[i] || (std::isnan(found[i]) && std::isnan(numbers[i])))
          << i << ": " << found[i] << ", " << numbers[i];
  }
};

// A case has blocks of 32 or 128, or of any length; columns in whole spans and packs, which kernels read at once, and any others that fill
// whole bytes.
struct Drawn {
  Quantization how;
  int64_t rows, cols;
};
Drawn drawn_size(CaseDraw& draw) {
  const Format format = draw.from({Format::e4m3, Format::e4m3, Format::e5m2, Format::e2m1});
  const int64_t block = draw.from<int64_t>({32, 128, 128, 2 * (1 + draw.below(70))}),
                step = draw.from<int64_t>({32, 8, format == Format::e2m1 ? 2 : 1});
  const int64_t down = draw.from<int64_t>({1, block, block});
  const bool columnwise = down > 1 && draw.one_in(2);
  const ScaleRule of_four_bits = draw.from({ScaleRule::flashinfer, ScaleRule::rceil, ScaleRule::mse}),
                  rule = format == Format::e2m1 ? of_four_bits : draw.from({ScaleRule::rceil, ScaleRule::floor, ScaleRule::mse});
  return {.how = {format, down, columnwise ? 1 : block, rule},
          .rows = draw.log_uniform(1, 300),
          .cols = draw.log_uniform(1, 700 / static_cast<double>(step)) * step};
}

TEST_F(PartialBlocks, HaveTheScalesOfTheElementsThatAreThere) {
  int partial = 0;
  for (uint32_t i = 0; i < 120; ++i) {
    CaseDraw draw(1000 + i);
    const auto [how, rows, cols] = drawn_size(draw);
    partial += rows % how.block_rows != 0 || cols % how.block_cols != 0;
    for (Backend* device : devices()) {
      SCOPED_TRACE(text(device->name(), ' ', rows, " x ", cols, ' ', how));
      const Tensor x = drawn(*device, i, rows, cols);
      // In every fourth case all that is left of the last block of the first rows is NaN.
      for (int64_t r = 0; i % 4 == 0 && r < std::min(rows, how.block_rows); ++r)
        for (int64_t c = (cols - 1) / how.block_cols * how.block_cols; c < cols; ++c) set_value(x, r * cols + c, std::nan(""));
      expect_quantized(quantized(x, how), expected(x, how));
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(partial, 80);
}

TEST_F(PartialBlocks, BecomeColumnsOfTheValuesOfRows) {
  for (uint32_t i = 0; i < 40; ++i) {
    CaseDraw draw(2000 + i);
    const Drawn size = drawn_size(draw);
    if (size.how.format == Format::e2m1) continue;
    const Quantization how = rows_of(size.how.format, size.how.block(), size.how.rule);
    for (Backend* device : devices()) {
      SCOPED_TRACE(text(device->name(), ' ', size.rows, " x ", size.cols, ' ', how));
      const QuantizedTensor rows = quantized(drawn(*device, i, size.rows, size.cols), how);
      const QuantizedTensor columns = empty_quantized(*device, rows.shape, how.transposed());
      device->run(RequantizeColumns{.x = rows, .out = columns});
      expect_quantized(columns, expected(dequantized(rows), columns.how));
      if (HasFatalFailure()) return;
    }
  }
}

// Servers pad a matrix with zeros to whole blocks, and take the scales and codes of the matrix itself.
TEST_F(PartialBlocks, AreThoseOfAMatrixPaddedWithZeros) {
  constexpr int64_t kRows = 200, kCols = 570, kPaddedRows = 256, kPaddedCols = 640;
  for (Backend* device : devices()) {
    for (const Quantization& how :
         {rows_of(Format::e4m3, 128), tiles_of(Format::e4m3, 128), rows_of(Format::e4m3, 32), tiles_of(Format::e4m3, 32)}) {
      const Tensor x = drawn(*device, 0, kRows, kCols);
      const std::vector<double> own = values(x);
      std::vector<double> padded(static_cast<size_t>(kPaddedRows * kPaddedCols), 0.0);
      for (int64_t i = 0; i < kRows * kCols; ++i)
        padded[static_cast<size_t>(i / kCols * kPaddedCols + i % kCols)] = own[static_cast<size_t>(i)];
      const QuantizedTensor codes = quantized(x, how),
                            whole = quantized(tensor_of(*device, Dtype::bf16, {kPaddedRows, kPaddedCols}, padded), how);
      const int64_t block = how.block();
      EXPECT_EQ(codes.scales.shape(), (Shape{how.tiles() ? ceil_div(kRows, block) : kRows, ceil_div(kCols, block)}));
      const std::vector<uint8_t> small = codes_of(codes), large = codes_of(whole);
      const std::vector<int> small_scales = scales_of(codes), large_scales = scales_of(whole);
      for (int64_t i = 0; i < kRows * kCols; ++i) {
        const auto at = static_cast<size_t>(i), there = static_cast<size_t>(i / kCols * kPaddedCols + i % kCols);
        ASSERT_EQ(small[at], large[there]) << device->name() << ' ' << how << ' ' << i;
        ASSERT_EQ(small_scales[at], large_scales[there]) << device->name() << ' ' << how << ' ' << i;
      }
    }
  }
}

TEST_F(PartialBlocks, TellAnExtremeScaleOfAnyRow) {
  for (Backend* device : devices()) {
    const QuantizedTensor codes = quantized(drawn(*device, 0, 5, 70), rows_of(Format::e4m3, 32));
    for (const int64_t scale : {0, 7, 14}) {
      set_value(codes.scales, scale, 2);
      const Tensor extreme = zeros(*device, Dtype::i32, {1});
      device->run(Dequantize{.x = codes, .out = empty(*device, Dtype::bf16, codes.shape), .extreme = extreme});
      EXPECT_EQ(to_host<int32_t>(extreme), std::vector{1}) << device->name() << ' ' << scale;
      set_value(codes.scales, scale, 127);
    }
  }
}

// fprop, dgrad and wgrad of a weight in tiles, against sums in fp64 of what the codes stand for.
TEST_F(PartialBlocks, AreMultipliedInAllThreeGemms) {
  for (uint32_t i = 0; i < 16; ++i) {
    CaseDraw draw(3000 + i);
    const int64_t tokens = draw.log_uniform(1, 150), in = draw.from<int64_t>({576, 192, 8 * (1 + draw.below(60)), 1 + draw.below(300)}),
                  out = draw.from<int64_t>({576, 320, 1 + draw.below(300)});
    const int64_t block = draw.from<int64_t>({32, 128});
    const Quantization rows = rows_of(Format::e4m3, block), tiles = tiles_of(Format::e4m3, block);
    for (Backend* device : devices()) {
      SCOPED_TRACE(text(device->name(), ' ', tokens, " tokens, ", in, " to ", out, " in blocks of ", block));
      const QuantizedTensor weight = quantized(drawn(*device, 0, out, in), tiles);
      const QuantizedTensor x = quantized_padded(drawn(*device, 0, tokens, in), rows),
                            dy = quantized_padded(drawn(*device, 1, tokens, out), rows);
      const auto expect = [&](const Operand& a, const Operand& b) {
        const Gemm gemm{.a = a, .b = b, .out = empty(*device, Dtype::f32, {a.rows(), b.cols()}), .accumulate = false};
        device->run(gemm);
        expect_exact(gemm, {}, 2e-6);
      };
      const auto columns = [&](const QuantizedTensor& of) {
        const QuantizedTensor turned = empty_quantized(*device, of.shape, of.how.transposed());
        device->run(RequantizeColumns{.x = of, .out = turned});
        return turned;
      };
      expect({x}, {weight, true});
      expect({dy}, {weight});
      expect({columns(dy), true}, {columns(x)});
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace mantissa::test::partial_blocks_test
