// The GEMMs of generation (few_rows_gemm.h): their products, the things that their bits depend on, and the codes that they leave to tiles.
#include "backend/few_rows.h"

#include "backend/cpu/fast/gemm/few_rows_gemm.h"
#include "base/cpu_level.h"
#include "exact_gemm.h"
#include "gemm_shapes.h"
#include "kernel_cases_quantized.h"

namespace mantissa::test::few_rows_test {

constexpr Quantization kFormats[] = {{},
                                     {Format::e4m3, 1, 32},
                                     {Format::e4m3, 32, 32},
                                     {Format::e4m3, 1, 128},
                                     {Format::e4m3, 128, 128},
                                     {Format::e2m1, 1, 32, ScaleRule::flashinfer},
                                     {Format::e2m1, 1, 96},
                                     {Format::e2m1, 32, 32}};

class FewRowsTest : public BackendTest {
 protected:
  // A weight [n, k], of values or codes of elements whose magnitudes differ by 2^24, a seventh of them zero.
  Value weight(const Quantization& how, Dtype dtype, int64_t n, int64_t k, uint32_t what) {
    if (!how) return tensor_of(fast(), dtype, {n, k}, wide_values(n, k, what, 12));
    return quantized(tensor_of(fast(), Dtype::bf16, {n, k}, wide_values(n, k, what, 12)), how);
  }
  Tensor product(const Tensor& a, const Value& b, Dtype out, const Tensor& bias = {}) {
    const FewRowsGemm gemm{.a = a, .b = b, .out = empty(fast(), out, {a.dim(0), shape_of(b)[0]}), .bias = bias};
    EXPECT_TRUE(multiply_few_rows({&gemm, 1}));
    return gemm.out;
  }
  static void expect_product(const Tensor& d, const Tensor& a, const Value& b, const Tensor& bias) {
    expect_exact(Gemm{.a = {a}, .b = {b, true}, .out = d, .accumulate = false, .bias = bias}, {}, 1e-6);
  }

  // Multiplies by rows of the identity.
  void expect_decoded(const QuantizedTensor& w, const std::vector<int64_t>& columns) {
    const int64_t rows = w.shape[0], depth = w.shape[1];
    const Tensor x = zeros(fast(), Dtype::f32, {std::ssize(columns), depth});
    for (size_t i = 0; i < columns.size(); ++i) x.data<float>()[static_cast<int64_t>(i) * depth + columns[i]] = 1.0F;
    const std::vector<double> all = exact_values(w), found = values(product(x, w, Dtype::f32));
    for (size_t i = 0; i < found.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) % rows, column = columns[i / static_cast<size_t>(rows)];
      ASSERT_EQ(found[i], all[static_cast<size_t>(row * depth + column)])
          << w.how << " at scale " << int{w.scales.data<uint8_t>()[0]} << ": [" << row << ", " << column << ']';
    }
  }
  static std::vector<int64_t> all_columns() {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < 256; ++i) out.push_back(i);
    return out;
  }

  // Makes all codes in equal numbers in a weight of 32 rows, all of one scale.
  QuantizedTensor all_codes(const Quantization& how, uint8_t scale) {
    const QuantizedTensor out = empty_quantized(fast(), {32, 256}, how);
    for (int64_t i = 0; i < out.codes.elements(); ++i) {
      const auto code = static_cast<uint8_t>(i % 256);
      out.codes.data<uint8_t>()[i] = how.format == Format::e4m3 && (code & 0x7F) == 0x7F ? uint8_t{0} : code;
    }
    std::fill_n(out.scales.data<uint8_t>(), out.scales.elements(), scale);
    return out;
  }
};

TEST_F(FewRowsTest, AreTheExactProductsWithinTheRoundingOfTheirSums) {
  for (uint32_t i = 0; i < 150; ++i) {
    CaseDraw draw(i);
    const Quantization how = kFormats[i % std::size(kFormats)];
    const Dtype dtype = draw.from({Dtype::f32, Dtype::bf16}), out = draw.from({dtype, Dtype::f32});
    int64_t n = draw.log_uniform(1, 200), k = draw.log_uniform(1, 1200);
    whole_blocks_of(how, false, n, k);
    if (how) n -= draw.below(how.block_rows), k -= 32 * draw.below(how.block_cols / 32);  // smaller blocks at the end, in whole spans
    const int64_t m = draw.from<int64_t>({1, 1, 2, 3, 4, 5, 8, 13});
    SCOPED_TRACE(text(m, " x ", n, " x ", k, " of ", how, ' ', dtype, " to ", out));
    const Tensor a = tensor_of(fast(), dtype, {m, k}, wide_values(m, k, 3 * i, 12));
    const Value b = weight(how, dtype, n, k, 3 * i + 1);
    const Tensor bias = draw.one_in(2) ? random_tensor(fast(), draw.from({dtype, Dtype::f32}), {n}, 3 * i + 2) : Tensor();
    expect_product(product(a, b, out, bias), a, b, bias);
    if (HasFailure()) return;
  }
}

// A weight is read in pieces, as many for each thread, here of rows that begin and end inside blocks.
TEST_F(FewRowsTest, OfBlocksThatPiecesShareAreExact) {
  for (const int threads : {2, 3}) {
    set_num_threads(threads);
    for (const auto& [how, rows, depth] : {std::tuple{kFormats[2], 352, 544}, {kFormats[4], 640, 384}, {kFormats[7], 352, 1088}}) {
      const Tensor a = tensor_of(fast(), Dtype::bf16, {2, depth}, wide_values(2, depth, 1, 12));
      const Value b = weight(how, Dtype::bf16, rows, depth, 2);
      SCOPED_TRACE(text(how, ", ", threads));
      expect_product(product(a, b, Dtype::f32), a, b, {});
    }
  }
  set_num_threads(0);
}

// A sum of one term is that term: every code at scales that are not extreme, the outermost ones included.
TEST_F(FewRowsTest, DecodeEveryCodeExactly) {
  for (const Quantization& how : {kFormats[1], kFormats[2], kFormats[5], kFormats[7]}) {
    const int least = how.format == Format::e4m3 ? 10 : 2, most = how.format == Format::e4m3 ? 246 : 252;
    for (int scale = least; scale <= most; scale += scale < least + 4 || scale > most - 9 ? 1 : 6)
      expect_decoded(all_codes(how, static_cast<uint8_t>(scale)), all_columns());
  }
}

// Codes without zeros and subnormal elements, which take a shorter way: each in its place, which no neighbor's code has.
TEST_F(FewRowsTest, DecodeNormalCodesInTheirPlaces) {
  for (const Quantization& how : {kFormats[1], kFormats[2], kFormats[4]}) {
    const QuantizedTensor codes = empty_quantized(fast(), {128, 256}, how);
    for (int64_t i = 0; i < codes.codes.elements(); ++i)
      codes.codes.data<uint8_t>()[i] = static_cast<uint8_t>((8 + i * 37 % 119) | (i % 3 == 0 ? 0x80 : 0));
    for (int64_t i = 0; i < codes.scales.elements(); ++i) codes.scales.data<uint8_t>()[i] = static_cast<uint8_t>(100 + i * 7 % 60);
    expect_decoded(codes, all_columns());
  }
}

// Covers rows whose codes are all alike, and each code beside normal ones, in columns of each step of 64.
TEST_F(FewRowsTest, DecodeEveryCodeAmongOthers) {
  const auto finite = [](int64_t code) { return (code & 0x7F) == 0x7F ? uint8_t{0} : static_cast<uint8_t>(code); };
  const QuantizedTensor w = empty_quantized(fast(), {256, 320}, kFormats[1]);
  uint8_t* const codes = w.codes.data<uint8_t>();
  for (const uint8_t scale : {uint8_t{10}, uint8_t{127}, uint8_t{246}}) {
    for (int64_t i = 0; i < w.codes.elements(); ++i) codes[i] = finite(i / 320);
    std::fill_n(w.scales.data<uint8_t>(), w.scales.elements(), scale);
    expect_decoded(w, {100});
  }
  std::fill_n(w.scales.data<uint8_t>(), w.scales.elements(), uint8_t{127});
  for (const int64_t column : {0, 63, 70, 150, 255, 256, 300, 319}) {
    std::fill_n(codes, w.codes.elements(), uint8_t{0x38});
    for (int64_t code = 0; code < 256; ++code) codes[code * 320 + column] = finite(code) == code ? finite(code) : uint8_t{0x38};
    expect_decoded(w, {column});
  }
}

TEST_F(FewRowsTest, HaveBitsThatDependOnNothingBesideARow) {
  for (const Quantization& how : kFormats) {
    const Tensor a = tensor_of(fast(), Dtype::bf16, {11, 480}, wide_values(11, 480, 1, 12));
    int64_t n = 200, k = 480;
    whole_blocks_of(how, false, n, k);
    const Tensor x = k == 480 ? a : tensor_of(fast(), Dtype::bf16, {11, k}, wide_values(11, k, 1, 12));
    const Value b = weight(how, Dtype::bf16, n, k, 2);
    const Tensor all = product(x, b, Dtype::f32);
    for (int64_t r = 0; r < 11; ++r)
      EXPECT_TRUE(same_bits(product(x.slice(r, r + 1), b, Dtype::f32), all.slice(r, r + 1))) << how << ' ' << r;
    for (const int threads : {1, 2, 5}) {
      const Threads scope(threads);
      EXPECT_TRUE(same_bits(product(x, b, Dtype::f32), all)) << how << ", " << threads << " threads";
    }
    const CpuLevel before = cpu_level();
    for (const CpuLevel level : {CpuLevel::x86_64, CpuLevel::x86_64_v3, CpuLevel::x86_64_v4}) {
      if (level > highest_cpu_level()) continue;
      use_cpu_level(level);
      EXPECT_TRUE(same_bits(product(x, b, Dtype::f32), all)) << how << ", " << name(level);
    }
    use_cpu_level(before);
  }
}

// Tiles take these: the GEMM has the same value, and multiply_few_rows() says that the GEMM is not its own.
TEST_F(FewRowsTest, LeaveExtremeScalesAndNaNToTiles) {
  const FewRows scope;
  const Tensor x = random_tensor(fast(), Dtype::f32, {3, 256}, 1, 0x1p-20);  // so that no sum overflows
  const auto expect = [&](const QuantizedTensor& w, const Tensor& a, bool own, const std::string& what) {
    const FewRowsGemm gemm{.a = a, .b = w, .out = empty(fast(), Dtype::f32, {a.dim(0), 32})};
    EXPECT_EQ(multiply_few_rows({&gemm, 1}), own) << w.how << ' ' << what;
    const Tensor out = empty_like(gemm.out), expected = empty(reference(), Dtype::f32, gemm.out.shape());
    fast().run(Gemm{.a = {a}, .b = {w, true}, .out = out, .accumulate = false});
    reference().run(Gemm{.a = {a}, .b = {w, true}, .out = expected, .accumulate = false});
    EXPECT_TRUE(close(values(out), values(expected), 1e-5)) << w.how << ' ' << what;
  };
  for (const Quantization& how : {kFormats[1], kFormats[2], kFormats[3], kFormats[5], kFormats[7]}) {
    const bool wide = how.format == Format::e4m3;
    const auto with_scale = [&](uint8_t scale) {
      const QuantizedTensor w = all_codes(how, 127);
      w.scales.data<uint8_t>()[w.scales.elements() - 1] = scale;
      return w;
    };
    for (const int scale : {wide ? 10 : 2, wide ? 246 : 252}) expect(with_scale(static_cast<uint8_t>(scale)), x, true, text(scale));
    for (const int scale : {0, wide ? 9 : 1, wide ? 247 : 253, 254, 255})
      expect(with_scale(static_cast<uint8_t>(scale)), x, false, text(scale));
    QuantizedTensor zero = with_scale(0);
    const int64_t per_row = zero.codes.elements() / 32, last = per_row * how.block_cols / 256;
    for (int64_t row = 0; row < 32; ++row) std::fill_n(zero.codes.data<uint8_t>() + (row + 1) * per_row - last, last, uint8_t{0});
    expect(zero, x, true, "scale 0 of zeros");
    zero.codes.data<uint8_t>()[32 * per_row - 1] = wide ? 0x80 : 0x88;
    expect(zero, x, true, "scale 0 of -0");
    for (const int64_t back : {last, int64_t{1}}) {
      for (const int code : {1, wide ? 0x40 : 0x10}) {
        uint8_t& one = zero.codes.data<uint8_t>()[32 * per_row - back];
        const uint8_t before = std::exchange(one, static_cast<uint8_t>(code));
        expect(zero, x, false, text("scale 0 of one element ", code, ", ", back, " from the end"));
        one = before;
      }
    }
    if (!wide) continue;
    const QuantizedTensor nan = with_scale(127), normal = with_scale(127);
    std::fill_n(normal.codes.data<uint8_t>(), normal.codes.elements(), uint8_t{0x38});
    for (const QuantizedTensor& w : {nan, normal}) {
      w.codes.data<uint8_t>()[5 * 256 + 77] = 0xFF;
      for (const int64_t rows : {1, 2, 3, 4}) expect(w, random_tensor(fast(), Dtype::f32, {rows, 256}, 1), false, text("NaN, ", rows));
    }
  }
  const Tensor large = random_tensor(fast(), Dtype::f32, {3, 256}, 2);
  large.data<float>()[700] = 0x1p118F;
  expect(all_codes(kFormats[5], 100), large, true, "2^118");
  large.data<float>()[700] = 0x1p119F;
  expect(all_codes(kFormats[5], 100), large, false, "2^119");
}

// All GEMMs go to tiles if one of several needs them.
TEST_F(FewRowsTest, LeaveAllToTilesWhereOneIs) {
  const Threads scope(1);
  const Tensor x = random_tensor(fast(), Dtype::f32, {1, 256}, 1, 0x1p-20), large = random_tensor(fast(), Dtype::f32, {1, 256}, 2);
  large.data<float>()[7] = 0x1p119F;
  const QuantizedTensor w = all_codes(kFormats[1], 127), nan = all_codes(kFormats[1], 127);
  nan.codes.data<uint8_t>()[77] = 0xFF;
  const auto run = [&](const Tensor& a, const Value& b, const Tensor& next_a, const Value& next_b) {
    const FewRowsGemm gemms[] = {{.a = a, .b = b, .out = empty(fast(), Dtype::f32, {1, 32})},
                                 {.a = next_a, .b = next_b, .out = empty(fast(), Dtype::f32, {1, 32})}};
    return multiply_few_rows(gemms);
  };
  EXPECT_TRUE(run(x, w, x, w));
  EXPECT_FALSE(run(large, w, x, w));
  EXPECT_FALSE(run(x, w, large, w));
  EXPECT_FALSE(run(x, nan, x, w));
  EXPECT_FALSE(run(x, w, x, nan));
}

TEST_F(FewRowsTest, TakeTheFormatsThatTheyRead) {
  for (const Quantization& how : kFormats) EXPECT_TRUE(takes_few_rows(weight(how, Dtype::bf16, 384, 384, 1))) << how;
  for (const Quantization& how : {Quantization{Format::e5m2, 1, 32}, Quantization{Format::e2m1, 1, 16}, Quantization{Format::e4m3, 1, 48},
                                  Quantization{Format::e4m3, 32, 1}})
    EXPECT_FALSE(takes_few_rows(weight(how, Dtype::bf16, 96, 96, 1))) << how;
  EXPECT_FALSE(takes_few_rows(empty(reference(), Dtype::f64, {2, 2})));
}

// Elements of these are subnormal, and tiles honor them then.
TEST_F(FewRowsTest, LeaveExtremeScalesOfTheOtherOperandToTiles) {
  const FewRows scope;
  const auto codes = [&](Shape shape, uint32_t what, double scale) {
    return quantized(random_tensor(fast(), Dtype::bf16, shape, what, scale), kFormats[1]);
  };
  const QuantizedTensor a = codes({32, 256}, 1, 0x1p-128), w = codes({32, 256}, 2, 0x1p+100);
  const Tensor out = empty(fast(), Dtype::f32, {3, 32}), expected = empty(reference(), Dtype::f32, {3, 32});
  for (const auto& [device, to] : {std::pair<Backend*, Tensor>{&fast(), out}, {&reference(), expected}})
    device->run(Gemm{.a = {slice(a, 0, 3)}, .b = {w, true}, .out = to, .accumulate = false});
  EXPECT_TRUE(close(values(out), values(expected), 1e-5));
}

// Inside the scope a GEMM has these bits, and with one row more those of tiles.
TEST_F(FewRowsTest, AreThoseOfTheScope) {
  for (const Quantization& how : {kFormats[0], kFormats[2], kFormats[5]}) {
    const Tensor x = tensor_of(fast(), Dtype::bf16, {17, 384}, wide_values(17, 384, 3, 12));
    const Value w = weight(how, Dtype::bf16, 96, 384, 4);
    const auto gemm = [&](const Value& a, int64_t rows) {
      const Tensor out = empty(fast(), Dtype::f32, {rows, 96});
      fast().run(Gemm{.a = {a}, .b = {w, true}, .out = out, .accumulate = false});
      return out;
    };
    const Tensor few = product(x, w, Dtype::f32), tiles = gemm(x, 17);
    EXPECT_FALSE(same_bits(few, tiles));
    {
      const FewRows scope;
      EXPECT_TRUE(same_bits(gemm(x, 17), tiles)) << how;
      EXPECT_TRUE(same_bits(gemm(x.slice(0, 16), 16), few.slice(0, 16))) << how;
      const QuantizedTensor codes = quantized(x.slice(0, 16), {Format::e4m3, 1, 32});
      EXPECT_TRUE(same_bits(gemm(codes, 16), product(dequantized(codes), w, Dtype::f32))) << how;
    }
    const FewRows more(17);
    EXPECT_TRUE(same_bits(gemm(x, 17), few)) << how;
  }
}

TEST_F(FewRowsTest, OfGroupsAreThoseOfTheirMatrices) {
  const std::vector<double> offsets{0, 3, 3, 4, 9};
  for (const Quantization& how : {kFormats[0], kFormats[2], kFormats[5]}) {
    for (const bool codes : {false, true}) {
      const Tensor x = tensor_of(fast(), Dtype::bf16, {12, 96}, wide_values(12, 96, 5, 12));
      const Value a =
          codes ? Value(quantized(tensor_of(fast(), Dtype::bf16, {32, 96}, wide_values(32, 96, 5, 12)), {Format::e4m3, 1, 32})) : x;
      const Value rows = codes ? Value(slice(std::get<QuantizedTensor>(a), 0, 12)) : a, w = weight(how, Dtype::bf16, 4 * 64, 96, 6);
      const Tensor out = empty(fast(), Dtype::bf16, {12, 64});
      const FewRows scope(5);
      fast().run(GroupedGemm{.a = {rows}, .b = {w, true}, .out = out, .offsets = tensor_of(fast(), Dtype::i32, {5}, offsets)});
      for (size_t g = 0; g < 4; ++g) {
        const auto begin = static_cast<int64_t>(offsets[g]), end = static_cast<int64_t>(offsets[g + 1]),
                   first = static_cast<int64_t>(g) * 64;
        if (begin == end) continue;
        const auto part = [](const Value& of, int64_t from, int64_t to) {
          const auto* quantized = std::get_if<QuantizedTensor>(&of);
          return quantized ? Value(slice(*quantized, from, to)) : Value(std::get<Tensor>(of).slice(from, to));
        };
        const Value own = part(rows, begin, end);
        const Tensor dense = codes ? dequantized(std::get<QuantizedTensor>(own)) : std::get<Tensor>(own);
        EXPECT_TRUE(same_bits(out.slice(begin, end), product(dense, part(w, first, first + 64), Dtype::bf16))) << how << ", group " << g;
      }
      for (const double value : values(out.slice(9, 12))) EXPECT_EQ(value, 0.0);
    }
  }
}

TEST_F(FewRowsTest, OfAGroupWithMoreRowsAreThoseOfTiles) {
  const Tensor x = tensor_of(fast(), Dtype::bf16, {9, 96}, wide_values(9, 96, 5, 12));
  const Value w = weight(kFormats[2], Dtype::bf16, 2 * 64, 96, 6);
  const auto gemm = [&] {
    const Tensor out = empty(fast(), Dtype::f32, {9, 64});
    fast().run(GroupedGemm{.a = {x}, .b = {w, true}, .out = out, .offsets = tensor_of(fast(), Dtype::i32, {3}, {0, 4, 9})});
    return out;
  };
  const Tensor tiles = gemm();
  const FewRows four(4);
  EXPECT_TRUE(same_bits(gemm(), tiles));
  const FewRows five(5);
  EXPECT_FALSE(same_bits(gemm(), tiles));
}

}  // namespace mantissa::test::few_rows_test
