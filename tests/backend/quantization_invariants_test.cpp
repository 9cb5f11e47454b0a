// Properties that quantized matrices keep when they are transposed or turned from rowwise to columnwise codes, on values of several
// distributions.
#include <map>

#include "kernel_backends.h"
#include "quantized_matrices.h"
#include "slow_formats.h"

namespace mantissa::test::quantization_invariants_test {

constexpr std::array kFormats{Format::e4m3, Format::e5m2, Format::e2m1};
constexpr auto& kRules = kBlockRules;
constexpr int64_t kRows = 128, kCols = 256;

double scale_value(int scale) { return std::ldexp(1.0, scale - 127); }
bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

QuantizedTensor columns_from_rows(const QuantizedTensor& rows) {
  const QuantizedTensor out = empty_quantized(rows.device(), rows.shape, rows.how.transposed());
  rows.device().run(RequantizeColumns{.x = rows, .out = out});
  return out;
}

class Invariants : public OnAllBackends {
 protected:
  // check(device, distribution) for all.
  template <class Check>
  void for_each(const Check& check) {
    for (Backend* device : tested()) {
      for (const Distribution& distribution : distributions()) {
        SCOPED_TRACE(text(distribution.name, " on ", device->name()));
        check(*device, distribution);
      }
    }
  }
};

// ---- columnwise codes from rowwise ones

class RowsToColumns : public Invariants {
 protected:
  // Expects scales and codes that come of quantizing the values of the rowwise codes columnwise, by the slow reference.
  void expect_quantized_columns(const QuantizedTensor& rows) {
    const QuantizedTensor columns = columns_from_rows(rows);
    const SlowQuantized expected = slow_quantize(slow(rows.how.format), rows.how.rule, values(dequantized(rows)),
                                                 static_cast<size_t>(rows.shape[1]), static_cast<size_t>(rows.how.block()), 1);
    EXPECT_TRUE(same_elements(bytes_of(columns.scales), expected.scales)) << rows.how;
    EXPECT_TRUE(same_elements(codes_of(columns), expected.codes)) << rows.how;
  }
};

TEST_F(RowsToColumns, GivesTheBitsOfQuantizingTheFp32ValuesColumnwise) {
  for_each([&](Backend& device, const Distribution& distribution) {
    const Tensor x = drawn_matrix(device, distribution, kRows, kCols);
    for (const Format format : {Format::e4m3, Format::e5m2}) {
      for (const ScaleRule rule : kRules) {
        for (const int64_t block : {32, 128}) expect_quantized_columns(quantized(x, rows_of(format, block, rule)));
      }
    }
  });
}

TEST_F(RowsToColumns, OneNonFiniteElementPoisonsTheColumnsOfItsRowBlock) {
  for (Backend* device : tested()) {
    for (const double nonfinite : {kNan, kInf, -kInf}) {
      for (const int64_t block : {32, 128}) {
        const Tensor clean = drawn_matrix(*device, distributions()[0], kRows, kCols), x = copied(*device, clean);
        const int64_t row = 77, col = 140;
        set_value(x, row * kCols + col, nonfinite);
        const QuantizedTensor columns = columns_from_rows(quantized(x, rows_of(Format::e4m3, block))),
                              expected = columns_from_rows(quantized(clean, rows_of(Format::e4m3, block))),
                              direct = quantized(x, rows_of(Format::e4m3, block).transposed());
        const std::vector<uint8_t> codes = codes_of(columns), expected_codes = codes_of(expected);
        const std::vector<int> scales = scales_of(columns), expected_scales = scales_of(expected), direct_scales = scales_of(direct);
        for (int64_t i = 0; i < kRows * kCols; ++i) {
          const int64_t r = i / kCols, c = i % kCols;
          const auto at = static_cast<size_t>(i);
          const bool poisoned = r / block == row / block && c / block == col / block;
          ASSERT_EQ(scales[at], poisoned ? 255 : expected_scales[at]) << r << ' ' << c;
          ASSERT_EQ(codes[at], poisoned ? 0x7F : expected_codes[at]) << r << ' ' << c;
          ASSERT_EQ(direct_scales[at] == 255, r / block == row / block && c == col) << "quantized directly: " << r << ' ' << c;
        }
      }
    }
  }
}

TEST_F(RowsToColumns, SaturatesUnderFloorInsteadOfBecomingNan) {
  for (Backend* device : tested()) {
    for (const int64_t block : {32, 128}) {
      std::vector<double> x(static_cast<size_t>(block * block));
      x[0] = 240, x[1] = 256;
      const QuantizedTensor rows =
          quantized(tensor_of(*device, Dtype::bf16, {block, block}, x), rows_of(Format::e4m3, block, ScaleRule::floor));
      ASSERT_EQ(codes_of(rows)[0], 0x77);
      const QuantizedTensor columns = columns_from_rows(rows);
      EXPECT_EQ(scales_of(columns)[0], 126);
      EXPECT_EQ(codes_of(columns)[0], 0x7E) << "0x7F would be NaN";
      EXPECT_EQ(values(dequantized(columns))[0], 224);
      EXPECT_EQ(values(dequantized(columns))[1], 256);
    }
  }
}

// |x - x'| over the bound for E4M3 under rceil: half an ulp of the rowwise rounding, and of the columnwise one where the scale grows.
struct Shifted {
  double worst = 0;  // share of the bound
  int64_t changed = 0, elements = 0;
};

Shifted shifted(const Tensor& x) {
  const QuantizedTensor rows = quantized(x, rows_of(Format::e4m3, 32)), columns = columns_from_rows(rows);
  const std::vector<double> before = values(x), once = values(dequantized(rows)), twice = values(dequantized(columns));
  const std::vector<int> row_scales = scales_of(rows), column_scales = scales_of(columns);
  Shifted out;
  for (size_t i = 0; i < before.size(); ++i) {
    if (!std::isfinite(twice[i]) || !std::isfinite(once[i])) continue;
    const int row_scale = row_scales[i], column_scale = column_scales[i], shift = column_scale - row_scale;
    const double bound = std::max(std::abs(before[i]) * 0x1p-4 / (1 + 0x1p-4), 0x1p-10 * scale_value(row_scale)) +
                         (shift > 0 ? 0x1p-10 * scale_value(column_scale) : 0.0);
    out.worst = std::max(out.worst, std::abs(before[i] - twice[i]) / bound);
    out.elements += 1;
    if (once[i] == twice[i]) continue;
    out.changed += 1;
    EXPECT_GT(shift, 0) << i;
    EXPECT_LT(std::abs(once[i]) / scale_value(row_scale), std::ldexp(1.0, shift - 6)) << i;
  }
  return out;
}

TEST_F(RowsToColumns, ErrsWithinTheBoundForE4M3) {
  std::map<std::string, double> shares;  // shares of elements that the second quantization changes
  for_each([&](Backend& device, const Distribution& distribution) {
    const Shifted result = shifted(drawn_matrix(device, distribution, kRows, kCols));
    EXPECT_LE(result.worst, 1.0);
    EXPECT_GT(result.worst, 0.9);
    const double share = static_cast<double>(result.changed) / static_cast<double>(result.elements);
    shares[distribution.name] = share;
  });
  EXPECT_LT(shares["normal"], 1e-3);
  EXPECT_NEAR(shares["log_normal"], 0.008, 0.006);
  EXPECT_NEAR(shares["spread_rows"], 0.27, 0.08);
}

// 17/16 of 2^-10 is rounded to even in its row, where it is the largest, and what is left is half of the smallest element beside 448.
TEST_F(RowsToColumns, AttainsTheBound) {
  for (Backend* device : tested()) {
    std::vector<double> x(32 * 32);
    x[0] = 448, x[5 * 32] = 0x1.1p-10;
    EXPECT_EQ(shifted(tensor_of(*device, Dtype::bf16, {32, 32}, x)).worst, 1.0);
  }
}

// ---- tiles

TEST_F(Invariants, TilesOfTheTransposeAreTheTransposedTiles) {
  for_each([&](Backend& device, const Distribution& distribution) {
    const Tensor x = drawn_matrix(device, distribution, kRows, kCols);
    const Tensor turned = tensor_of(device, Dtype::bf16, {kCols, kRows}, transposed(values(x), kCols));
    for (const Format format : kFormats) {
      for (const ScaleRule rule : kRules) {
        for (const int64_t block : {32, 128}) {
          const QuantizedTensor q = quantized(x, tiles_of(format, block, rule)), t = quantized(turned, tiles_of(format, block, rule));
          EXPECT_TRUE(same_elements(codes_of(t), transposed(codes_of(q), kCols))) << q.how;
          EXPECT_TRUE(same_elements(bytes_of(t.scales), transposed(bytes_of(q.scales), kCols / block))) << q.how;
        }
      }
    }
  });
}

TEST_F(Invariants, RepeatedScalesOfTilesServeRowsAndColumns) {
  for_each([&](Backend& device, const Distribution& distribution) {
    const Tensor x = drawn_matrix(device, distribution, kRows, kCols);
    for (const Format format : kFormats) {
      for (const int64_t block : {32, 128}) {
        const QuantizedTensor tiles = quantized(x, tiles_of(format, block));
        const std::vector<int> of_tiles = scales_of(tiles);
        for (const Quantization& how : {rows_of(format, block), rows_of(format, block).transposed()}) {
          const Shape shape = scales_shape(tiles.shape, how);
          std::vector<double> scales;
          for (int64_t i = 0; i < shape.elements(); ++i) {
            const int64_t row = i / shape[1] * how.block_rows, col = i % shape[1] * how.block_cols;
            scales.push_back(of_tiles[static_cast<size_t>(row * kCols + col)]);
          }
          const QuantizedTensor repeated{tiles.codes, tensor_of(device, Dtype::u8, shape, scales), tiles.shape, how};
          for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
            EXPECT_TRUE(same_bits(dequantized(repeated, dtype), dequantized(tiles, dtype))) << how;
          }
        }
      }
    }
  });
}

// ---- weights on the grid of MXFP4 as MXFP8

// Values of MXFP4 codes, all 16 of them, whose scale is base(row, block of the row).
template <class Base>
Tensor mxfp4_values(Backend& device, Shape shape, int64_t block, const Base& base) {
  const QuantizedTensor q = empty_quantized(device, shape, rows_of(Format::e2m1, block, ScaleRule::flashinfer));
  std::vector<double> codes, scales;
  for (int64_t i = 0; i < q.codes.elements(); ++i) codes.push_back(integer_draw(10, i, 256));
  for (int64_t i = 0; i < q.scales.elements(); ++i) scales.push_back(base(i / q.scales.dim(1), i % q.scales.dim(1)));
  assign(q.codes, codes);
  assign(q.scales, scales);
  return dequantized(q, Dtype::bf16);
}

double changed_share(const Tensor& x, const Quantization& how) {
  const std::vector<double> before = values(x), after = values(dequantized(quantized(x, how)));
  int64_t changed = 0;
  for (size_t i = 0; i < before.size(); ++i) changed += !same_value(before[i], after[i]);
  return static_cast<double>(changed) / static_cast<double>(before.size());
}

TEST_F(Invariants, Mxfp4ValuesAreRowwiseMxfp8WithoutLoss) {
  for (Backend* device : tested()) {
    for (const int64_t block : {32, 64}) {
      const Tensor any =
          mxfp4_values(*device, {512, kCols}, block, [](int64_t row, int64_t b) { return integer_draw(11, row * 64 + b, 253); });
      EXPECT_EQ(changed_share(any, rows_of(Format::e4m3, 32)), 0.0) << "scales 0 to 252, blocks of " << block;
      for (const Distribution& distribution : distributions()) {
        if (distribution.name == std::string("huge")) continue;  // scales above 252
        const Tensor w = drawn_matrix(*device, distribution, kRows, kCols), fake = empty_like(w);
        device->run(FakeQuantize{.x = w, .out = fake, .how = rows_of(Format::e2m1, block, ScaleRule::flashinfer)});
        EXPECT_EQ(changed_share(fake, rows_of(Format::e4m3, 32)), 0.0) << distribution.name << ", blocks of " << block;
      }
    }
  }
}

TEST_F(Invariants, Mxfp4ValuesAreColumnwiseAndTiledMxfp8WithoutLossUpTo14BinadesOfScales) {
  const auto up_to = [](int spread) {
    return [spread](int64_t row, int64_t b) {  // each tile, of 32 rows and 64 columns, has a base of its own
      return integer_draw(12, row / 32 * 64 + b, 252 - spread) + integer_draw(13, row * 64 + b, spread + 1);
    };
  };
  const Quantization columns = rows_of(Format::e4m3, 32).transposed(), tiles = tiles_of(Format::e4m3, 32);
  for (Backend* device : tested()) {
    for (const int64_t block : {32, 64}) {
      const Tensor near = mxfp4_values(*device, {512, kCols}, block, up_to(14)),
                   far = mxfp4_values(*device, {512, kCols}, block, up_to(15));
      EXPECT_EQ(changed_share(near, columns), 0.0);
      EXPECT_EQ(changed_share(near, tiles), 0.0);
      EXPECT_GT(changed_share(far, columns), 0.0);
      EXPECT_GT(changed_share(far, tiles), 0.0);
    }
    const Tensor w = drawn_matrix(*device, distributions()[3], 512, kCols), fake = empty_like(w);
    device->run(FakeQuantize{.x = w, .out = fake, .how = rows_of(Format::e2m1, 32, ScaleRule::flashinfer)});
    EXPECT_NEAR(changed_share(fake, columns), 0.14, 0.05) << "rows spread by 2^+-10";
    EXPECT_NEAR(changed_share(fake, tiles), 0.19, 0.05);
  }
}

}  // namespace mantissa::test::quantization_invariants_test
