// Random bit patterns, NaN, Inf and subnormals among them, through every kernel that quantizes: every backend gives the bits of the
// reference, and all those of the slow reference. kernels_test compares the same kernels on numbers, where a sign of zero does not show.
#include <map>

#include "golden_vectors.h"
#include "kernel_backends.h"
#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/with_element.h"
#include "quantized_matrices.h"

namespace mantissa::test::quantization_bits_test {

constexpr std::array kFormats{Format::e4m3, Format::e5m2, Format::e2m1};
constexpr auto& kRules = kBlockRules;
// Transformer Engine's, DeepSeek's of activations, and the narrowest.
constexpr std::array kRanges{ScaleRange{1, 252}, ScaleRange{105, 254}, ScaleRange{0, 127}, ScaleRange{127, 254}, ScaleRange{127, 127}};

struct Sized {
  int64_t rows, cols;  // size of the input; the output has whole blocks
};

// Memory that nothing has been written to yet.
Tensor stale(Backend& device, Dtype dtype, Shape shape) {
  const std::vector<uint8_t> bytes(static_cast<size_t>(shape.elements() * dtype_bytes(dtype)), 0xFF);
  return from_host(device, dtype, shape, bytes.data());
}
QuantizedTensor stale(Backend& device, Shape shape, const Quantization& how) {
  return {.codes = stale(device, Dtype::u8, codes_shape(shape, how)),
          .scales = stale(device, Dtype::u8, scales_shape(shape, how)),
          .shape = shape,
          .how = how};
}
Tensor flag(Backend& device) { return tensor_of(device, Dtype::i32, {1}, {0}); }

// Codes and scales drawn byte by byte: codes of NaN and Inf among them. `scales` are the scale codes to choose from; a block whose draw
// says so holds zeros of both signs only.
QuantizedTensor random_codes(Backend& device, Shape shape, const Quantization& how, const std::vector<uint8_t>& scales, bool zeros) {
  const Shape codes = codes_shape(shape, how), blocks = scales_shape(shape, how);
  std::vector<uint8_t> scale_bytes, code_bytes;
  for (int64_t i = 0; i < blocks.elements(); ++i)
    scale_bytes.push_back(scales[random_words({.seed = 23}, 1, static_cast<uint64_t>(i))[0] % scales.size()]);
  const int64_t per_row = codes[1], per_byte = shape[1] / per_row;
  const auto signs = static_cast<uint8_t>(per_byte == 1 ? 0x80 : 0x88);
  for (int64_t i = 0; i < codes.elements(); ++i) {
    const auto words = random_words({.seed = 23}, 2, static_cast<uint64_t>(i));
    const int64_t block = i / per_row / how.block_rows * blocks[1] + i % per_row * per_byte / how.block_cols;
    const bool zero = zeros && random_words({.seed = 23}, 3, static_cast<uint64_t>(block))[0] % 2 == 0;
    code_bytes.push_back(static_cast<uint8_t>(zero ? words[0] & signs : words[0]));
  }
  return {.codes = from_host(device, Dtype::u8, codes, code_bytes.data()),
          .scales = from_host(device, Dtype::u8, blocks, scale_bytes.data()),
          .shape = shape,
          .how = how};
}

std::vector<uint8_t> scale_range(int first, int last) {
  std::vector<uint8_t> out;
  for (int scale = first; scale <= last; ++scale) out.push_back(static_cast<uint8_t>(scale));
  return out;
}

const std::vector<std::vector<uint8_t>> kScales = {scale_range(0, 255), scale_range(20, 236),  scale_range(124, 130),
                                                   scale_range(0, 18),  scale_range(236, 255), {0, 1, 2, 127, 253, 254, 255}};

class QuantizationBits : public OnAllBackends {
 protected:
  // Drawn once.
  const Tensor& matrix(const Patterns& p, Dtype dtype, const Sized& size) {
    Tensor& out = matrices_[text(p.name, ' ', dtype, ' ', size.rows, ' ', size.cols)];
    if (!out.defined()) out = pattern_matrix(reference(), p, dtype, size.rows, size.cols);
    return out;
  }

  // `run` gives the outputs of a kernel on a backend.
  template <class Run>
  void expect_same(const Run& run) {
    const std::vector<Tensor> expected = run(reference());
    for (Backend* device : tested()) {
      const std::vector<Tensor> actual = run(*device);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_TRUE(same_bits(actual[i], expected[i])) << "output " << i << " of " << device->name();
    }
  }

  void check_quantize(const Patterns& p, Dtype dtype, const Sized& size, const Quantization& how, bool both = false) {
    SCOPED_TRACE(text(p.name, " ", dtype, " ", size.rows, "x", size.cols, " ", how, both ? " both" : ""));
    const int64_t step = both ? how.block() : how.block_rows, rows = (size.rows + step - 1) / step * step;
    const Tensor& drawn = matrix(p, dtype, size);
    const std::vector<double> numbers = values(drawn);
    const bool finite = std::all_of(numbers.begin(), numbers.end(), [](double v) { return std::isfinite(v); });
    expect_same([&](Backend& device) {
      const Tensor nonfinite = flag(device);
      const QuantizedTensor out = stale(device, {rows, size.cols}, how);
      QuantizedTensor second;
      if (both) second = stale(device, {rows, size.cols}, how.transposed());
      device.run(Quantize{.x = copied(device, drawn), .out = out, .second = second, .nonfinite = nonfinite});
      EXPECT_EQ(values(nonfinite)[0], finite ? 0.0 : 1.0) << device.name();
      std::vector<Tensor> outputs = {out.codes, out.scales};
      if (both) outputs.insert(outputs.end(), {second.codes, second.scales});
      return outputs;
    });
  }

 private:
  std::map<std::string, Tensor> matrices_;
};

TEST_F(QuantizationBits, QuantizeOfAnyPatternIsThatOfTheReference) {
  for (const Format format : kFormats) {
    for (const ScaleRule rule : kRules) {
      for (const Patterns& p : patterns()) {
        for (const int64_t b : {32, 128}) {
          for (const Sized& size : {Sized{b, b}, {b + 5, 3 * b}, {2 * b - 1, 5 * b}}) {
            if (b == 128 && size.cols != 3 * b) continue;
            for (const Quantization& how : {rows_of(format, b, rule), rows_of(format, b, rule).transposed(), tiles_of(format, b, rule)}) {
              check_quantize(p, Dtype::bf16, size, how);
            }
            check_quantize(p, Dtype::bf16, size, rows_of(format, b, rule), true);
          }
        }
        for (const Sized& size : {Sized{1, 2048}, {33, 2048}}) check_quantize(p, Dtype::bf16, size, rows_of(format, 32, rule));
        check_quantize(p, Dtype::bf16, {31, 2048}, tiles_of(format, 32, rule));
        check_quantize(p, Dtype::bf16, {70, 96}, rows_of(format, 32, rule), true);
        for (const int64_t cols : {2, 34, 40, 48, 80}) {  // blocks along columns fit any width
          check_quantize(p, Dtype::bf16, {37, cols}, rows_of(format, 32, rule).transposed());
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Row i has the magnitude whose bf16 bits are i, of either sign and anywhere in its block, and nothing as large beside it.
TEST_F(QuantizationBits, ScalesAreThoseOfBlockScaleForEveryAmaxBelowNan) {
  constexpr int64_t kInf = 0x7F80, kBlock = 32;
  std::vector<bf16> x(static_cast<size_t>((kInf + 1) * kBlock));
  for (int64_t i = 0; i <= kInf; ++i) {
    for (int64_t c = 0; c < kBlock; ++c) x[static_cast<size_t>(i * kBlock + c)].bits = static_cast<uint16_t>(std::max<int64_t>(0, i - 1));
    x[static_cast<size_t>(i * kBlock + i % kBlock)].bits = static_cast<uint16_t>(i | (i / kBlock % 2 == 0 ? 0 : 0x8000));
  }
  for (const Format format : kFormats) {
    for (const ScaleRule rule : kAllRules) {
      if (rule == ScaleRule::flashinfer && format != Format::e2m1) continue;
      for (Backend* device : devices()) {
        const QuantizedTensor out = stale(*device, {kInf + 1, kBlock}, rows_of(format, kBlock, rule));
        device->run(Quantize{.x = from_host(*device, Dtype::bf16, out.shape, x.data()), .out = out});
        const std::vector<uint8_t> scales = bytes_of(out.scales);
        for (int64_t i = 0; i <= kInf; ++i) {
          const auto amax = static_cast<uint32_t>(i) << 16;
          const int expected = with_element(format, [&]<class E>() { return block_scale<E>(amax, rule); });
          ASSERT_EQ(int{scales[static_cast<size_t>(i)]}, expected) << out.how << " of 0x" << std::hex << i << ", " << device->name();
        }
      }
    }
  }
}

TEST_F(QuantizationBits, QuantizeOfFp32PatternsIsThatOfTheReference) {
  for (const Format format : kFormats) {
    for (const ScaleRule rule : kRules) {
      for (const Patterns& p : patterns()) {
        check_quantize(p, Dtype::f32, {45, 96}, rows_of(format, 32, rule), true);
        check_quantize(p, Dtype::f32, {45, 96}, tiles_of(format, 32, rule));
      }
    }
  }
}

TEST_F(QuantizationBits, QuantizeToARangeOfScalesIsThatOfTheReference) {
  for (const Format format : kFormats) {
    for (const ScaleRule rule : kRules) {
      for (const ScaleRange range : kRanges) {
        Quantization how = rows_of(format, 32, rule), tiles = tiles_of(format, 32, rule);
        how.range = tiles.range = range;
        for (const Patterns& p : patterns()) {
          check_quantize(p, Dtype::bf16, {37, 96}, how);
          check_quantize(p, Dtype::bf16, {37, 96}, tiles);
          check_quantize(p, Dtype::bf16, {37, 96}, how, true);
          check_quantize(p, Dtype::f32, {37, 96}, how, true);
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(QuantizationBits, E2m1OfAnyPatternIsThatOfTheReferenceForAnyBlockLength) {
  for (const Patterns& p : patterns()) {
    for (const int64_t b : {2, 6, 8, 16, 24, 32, 48, 64, 128, 256, 272}) {
      for (const Sized& size : {Sized{1, b}, {7, 3 * b}, {33, 16 * b}}) {
        for (const ScaleRule rule : {ScaleRule::flashinfer, ScaleRule::mse}) {
          if (b < 256 || size.rows < 33) check_quantize(p, Dtype::bf16, size, rows_of(Format::e2m1, b, rule));
        }
      }
    }
  }
}

TEST_F(QuantizationBits, DequantizeOfAnyCodeAtAnyScaleIsThatOfTheReference) {
  for (const Format format : kFormats) {
    for (const ScaleRule rule : {ScaleRule::rceil, ScaleRule::flashinfer}) {
      if (rule == ScaleRule::flashinfer && format != Format::e2m1) continue;
      for (const std::vector<uint8_t>& scales : kScales) {
        for (const bool zeros : {false, true}) {
          const auto check = [&](Shape shape, const Quantization& how) {
            SCOPED_TRACE(text(shape, " ", how, " scales from ", int{scales.front()}, zeros ? ", with blocks of zeros" : ""));
            const QuantizedTensor x = random_codes(reference(), shape, how, scales, zeros);
            for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
              expect_same([&](Backend& device) {
                const Tensor out = stale(device, dtype, shape), extreme = flag(device);
                device.run(Dequantize{.x = copied(device, x), .out = out, .extreme = extreme});
                return std::vector<Tensor>{out, extreme};
              });
            }
          };
          for (const int64_t b : {32, 128}) {
            check({2 * b, 3 * b}, rows_of(format, b, rule).transposed());
            check({2 * b, 3 * b}, tiles_of(format, b, rule));
            check({37, 3 * b}, rows_of(format, b, rule));
          }
          check({3, 2048}, rows_of(format, 32, rule));
          check({32, 34}, rows_of(format, 32, rule).transposed());
          if (format == Format::e2m1) check({5, 48}, rows_of(format, 8, rule)), check({5, 48}, rows_of(format, 24, rule));
        }
      }
    }
  }
}

TEST_F(QuantizationBits, AScaleIsReportedAsExtremeIfItsBlockHoldsANonZeroElement) {
  const auto tame = [](Format format, int scale) {
    if (format == Format::e2m1) return scale >= 2 && scale <= 252;
    return format == Format::e4m3 ? scale >= 10 && scale <= 246 : scale >= 17 && scale <= 239;
  };
  for (const Format format : kFormats) {
    for (const Quantization& how : {rows_of(format, 32), rows_of(format, 32).transposed(), tiles_of(format, 32)}) {
      for (int scale = 0; scale < 256; ++scale) {
        for (Backend* device : devices()) {
          const QuantizedTensor x = random_codes(*device, {32, 64}, how, {127}, false);
          const int64_t row = how.rowwise() ? 0 : 5, col = how.columnwise() ? 1 : 37;  // an element of the block of scale number 1
          set_value(x.scales, 1, scale);
          const int zero = format == Format::e2m1 ? 0x88 : 0x80;
          assign(x.codes, std::vector<double>(static_cast<size_t>(x.codes.elements()), zero));
          const auto extreme = [&] {
            const Tensor out = flag(*device);
            device->run(Dequantize{.x = x, .out = stale(*device, Dtype::bf16, x.shape), .extreme = out});
            return values(out)[0];
          };
          EXPECT_EQ(extreme(), 0.0) << how << " of zeros at " << scale << ", " << device->name();
          set_value(x.codes, (row * 64 + col) * x.codes.dim(1) / 64, zero | 0x11);
          EXPECT_EQ(extreme(), tame(format, scale) ? 0.0 : 1.0) << how << " at " << scale << ", " << device->name();
        }
      }
    }
  }
}

TEST_F(QuantizationBits, FakeQuantizeOfAnyPatternIsThatOfTheReference) {
  const auto check = [&](const Patterns& p, Dtype dtype, const Sized& size, const Quantization& how) {
    SCOPED_TRACE(text(p.name, " ", dtype, " ", size.rows, "x", size.cols, " ", how));
    expect_same([&](Backend& device) {
      const Tensor out = stale(device, dtype, {size.rows, size.cols});
      device.run(FakeQuantize{.x = copied(device, matrix(p, dtype, size)), .out = out, .how = how});
      return std::vector<Tensor>{out};
    });
  };
  for (const Patterns& p : patterns()) {
    for (const int64_t b : {2, 8, 16, 24, 32, 64, 128}) {
      check(p, Dtype::bf16, {7, 6 * b}, rows_of(Format::e2m1, b, ScaleRule::flashinfer));
      for (const Format format : kFormats) {
        for (const ScaleRule rule : kRules) check(p, Dtype::bf16, {7, 6 * b}, rows_of(format, b, rule));
      }
    }
    for (const Format format : kFormats) {
      check(p, Dtype::bf16, {64, 96}, tiles_of(format, 32));
      check(p, Dtype::bf16, {64, 96}, rows_of(format, 32).transposed());
      check(p, Dtype::f32, {7, 96}, rows_of(format, 32));
    }
  }
}

TEST_F(QuantizationBits, RequantizeColumnsOfAnyCodesIsThatOfTheReference) {
  const auto check = [&](const Shape& shape, const Quantization& how, const std::vector<uint8_t>& scales, bool zeros) {
    SCOPED_TRACE(text(shape, " ", how, " scales from ", int{scales.front()}, zeros ? ", with blocks of zeros" : ""));
    const QuantizedTensor x = random_codes(reference(), shape, how, scales, zeros);
    expect_same([&](Backend& device) {
      const QuantizedTensor out = stale(device, shape, how.transposed());
      device.run(RequantizeColumns{.x = copied(device, x), .out = out});
      return std::vector<Tensor>{out.codes, out.scales};
    });
  };
  for (const Format format : {Format::e4m3, Format::e5m2}) {
    for (const ScaleRule rule : kRules) {
      for (const std::vector<uint8_t>& scales : kScales) {
        for (const bool zeros : {false, true}) {
          for (const int64_t b : {32, 128}) {
            for (const int64_t blocks : {1, 3, 5}) check({b, blocks * b}, rows_of(format, b, rule), scales, zeros);
          }
        }
        check({64, 2048}, rows_of(format, 32, rule), scales, false);
        for (const ScaleRange range : kRanges) {
          Quantization how = rows_of(format, 32, rule);
          how.range = range;
          check({64, 96}, how, scales, true);
        }
      }
    }
  }
}

// Columns as rows of the transpose: those of the reference, written transposed here. 16 rows are a thread's of a GPU, 8 columns a pack's.
TEST_F(QuantizationBits, ColumnsComeAsRowsOfTheTransposeWhereTheyAreAskedFor) {
  const auto transposed_bytes = [](const Tensor& x) { return transposed(bytes_of(x), x.dim(1)); };
  for (const Format format : {Format::e4m3, Format::e5m2}) {
    for (const Patterns& p : patterns()) {
      for (const auto& [rows, cols, block] :
           {std::tuple<int64_t, int64_t, int64_t>{256, 384, 128}, {250, 200, 128}, {130, 20, 128}, {45, 96, 32}}) {
        const Quantization how = rows_of(format, block);
        const Shape padded{round_up(rows, block), cols}, across{cols, padded[0]};
        SCOPED_TRACE(text(p.name, ' ', rows, 'x', cols, ' ', how));
        const Tensor& x = matrix(p, Dtype::bf16, {rows, cols});
        const QuantizedTensor along = stale(reference(), padded, how), columns = stale(reference(), padded, how.transposed()),
                              again = stale(reference(), padded, how.transposed());
        reference().run(Quantize{.x = x, .out = along, .second = columns});
        reference().run(RequantizeColumns{.x = along, .out = again});
        for (Backend* device : devices()) {
          const QuantizedTensor out = stale(*device, padded, how), second = stale(*device, across, how),
                                third = stale(*device, across, how);
          device->run(Quantize{.x = copied(*device, x), .out = out, .second = second});
          device->run(RequantizeColumns{.x = out, .out = third});
          EXPECT_TRUE(same_bits(out.codes, along.codes) && same_bits(out.scales, along.scales)) << device->name();
          for (const auto& [from, to] : {std::pair{&columns, &second}, {&again, &third}}) {
            EXPECT_TRUE(same_elements(bytes_of(to->codes), transposed_bytes(from->codes))) << device->name();
            EXPECT_TRUE(same_elements(bytes_of(to->scales), transposed_bytes(from->scales))) << device->name();
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(QuantizationBits, SwizzledScalesLieWhereTheSlowReferencePutsThem) {
  for (const Shape& shape : {Shape{1, 32}, {32, 96}, {33, 160}, {130, 160}, {160, 2048}, {257, 544}}) {
    for (const bool columns : {false, true}) {
      const Quantization rows = rows_of(Format::e4m3, 32);
      const Shape matrix = columns ? Shape{shape[1], shape[0]} : shape;
      for (Backend* device : devices()) {
        const QuantizedTensor x = random_codes(*device, matrix, columns ? rows.transposed() : rows, scale_range(0, 255), false);
        const Tensor out = stale(*device, Dtype::u8, {swizzled_bytes(shape[0], shape[1] / 32)});
        device->run(SwizzleScales{.x = x, .out = out});
        const auto outer = static_cast<size_t>(shape[0]), inner = static_cast<size_t>(shape[1] / 32);
        EXPECT_TRUE(same_elements(bytes_of(out), slow_swizzle(bytes_of(x.scales), outer, inner, columns)))
            << matrix << ' ' << device->name();
      }
    }
  }
}

// Compares blocks of 128, which have no vectors, as tests/golden does those of 32.
class SlowReference : public OnAllBackends {
 protected:
  static SlowQuantized expected(const std::vector<double>& x, int64_t cols, const Quantization& how) {
    return slow_quantize(slow(how.format), how.rule, x, static_cast<size_t>(cols), static_cast<size_t>(how.block_rows),
                         static_cast<size_t>(how.block_cols));
  }
  static void expect_equal(const QuantizedTensor& q, const SlowQuantized& expected) {
    EXPECT_TRUE(same_elements(bytes_of(q.scales), expected.scales)) << q.how << ' ' << q.device().name();
    EXPECT_TRUE(same_elements(codes_of(q), expected.codes)) << q.how << ' ' << q.device().name();
    const std::vector<float> decoded = to_host<float>(dequantized(q));
    for (size_t i = 0; i < expected.values.size(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(decoded[i]);
      ASSERT_EQ(bits, std::isnan(value_of_bits(expected.values[i])) ? 0x7FC00000U : expected.values[i]) << i << ' ' << q.how;
    }
  }
};

// Each of the three scales is the best of some of these blocks.
TEST_F(SlowReference, AgreesWithEveryBackendOnScalesThatAreSearched) {
  constexpr int64_t kRows = 192, kCols = 512;
  const auto elements = static_cast<size_t>(kRows * kCols);
  const std::vector<double> along_rows = searched_blocks(elements, 256), anywhere = searched_blocks(elements, size_t{32} * kCols);
  std::array<int, 3> won{};  // by half of floor's scale, by it, by twice it
  for (const auto& [down, across] : {std::pair<int64_t, int64_t>{1, 32},
                                     {1, 16},
                                     {1, 48},
                                     {1, 64},
                                     {1, 128},
                                     {1, 256},
                                     {1, 272},
                                     {1, 6},
                                     {32, 1},
                                     {32, 32},
                                     {128, 128}}) {
    const std::vector<double>& x = down == 1 ? along_rows : anywhere;
    const Quantization how{Format::e2m1, down, across, ScaleRule::mse};
    const SlowQuantized searched = expected(x, kCols, how);
    const SlowQuantized floor = slow_quantize(slow(Format::e2m1), ScaleRule::floor, x, static_cast<size_t>(kCols),
                                              static_cast<size_t>(down), static_cast<size_t>(across));
    for (size_t i = 0; i < floor.scales.size(); ++i) ++won.at(static_cast<size_t>(searched.scales[i] - floor.scales[i] + 1));
    for (Backend* device : devices()) {
      for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
        const QuantizedTensor out = stale(*device, {kRows, kCols}, how);
        device->run(Quantize{.x = tensor_of(*device, dtype, {kRows, kCols}, x), .out = out});
        expect_equal(out, searched);
      }
    }
  }
  for (const int blocks : won) EXPECT_GT(blocks, 300);
}

// The largest amax of 32 elements for which half of floor's scale can be as good.
TEST_F(SlowReference, AgreesWithEveryBackendAtTheEdgeOfWhatIsSearched) {
  std::vector<double> x(32, 0.25);
  x[7] = 4 + 15 / 32.0;
  const Quantization how = rows_of(Format::e2m1, 32, ScaleRule::mse);
  const SlowQuantized searched = expected(x, 32, how);
  EXPECT_EQ(int{searched.scales[0]}, 126);
  for (Backend* device : devices()) {
    const QuantizedTensor out = stale(*device, {1, 32}, how);
    device->run(Quantize{.x = tensor_of(*device, Dtype::bf16, {1, 32}, x), .out = out});
    expect_equal(out, searched);
  }
}

// The binades of subnormal elements, where lanes do not cover blocks, and the last ones.
TEST_F(SlowReference, AgreesWithEveryBackendOnSearchedScalesOfAnyBinade) {
  constexpr int64_t kRows = 32, kCols = 64;
  const std::vector<double> drawn = searched_blocks(static_cast<size_t>(kRows * kCols), 256);
  for (const int binade : {-133, -130, -128, -127, -126, -125, -124, -123, -122, -121, -120, -119, -118, -100, 0, 100, 124, 125}) {
    std::vector<double> x;
    for (size_t i = 0; i < drawn.size(); ++i) {
      const double amax =
          *std::max_element(drawn.begin() + static_cast<int64_t>(i / 32 * 32), drawn.begin() + static_cast<int64_t>(i / 32 * 32 + 32),
                            [](double a, double b) { return std::abs(a) < std::abs(b); });
      x.push_back(value_of_bits(uint32_t{slow_bf16(std::ldexp(drawn[i], binade - std::ilogb(amax) + 2))} << 16));
    }
    for (Quantization how : {rows_of(Format::e2m1, 32, ScaleRule::mse), rows_of(Format::e2m1, 64, ScaleRule::mse),
                             rows_of(Format::e2m1, 32, ScaleRule::mse).transposed()}) {
      const SlowQuantized searched = expected(x, kCols, how);
      for (Backend* device : devices()) {
        const QuantizedTensor out = stale(*device, {kRows, kCols}, how);
        device->run(Quantize{.x = tensor_of(*device, Dtype::bf16, {kRows, kCols}, x), .out = out});
        SCOPED_TRACE(binade);
        expect_equal(out, searched);
      }
    }
  }
}

TEST_F(SlowReference, AgreesWithEveryBackendOnBlocksOf128) {
  const int64_t rows = 251, padded = 256, cols = 256;
  for (const Patterns& p : patterns()) {
    SCOPED_TRACE(p.name);
    const Tensor drawn = pattern_matrix(reference(), p, Dtype::bf16, rows, cols);
    std::vector<double> x = values(drawn);
    x.resize(static_cast<size_t>(padded * cols));
    for (const Format format : {Format::e4m3, Format::e5m2}) {
      for (const ScaleRule rule : kRules) {
        const Quantization along_rows = rows_of(format, 128, rule), along_columns = along_rows.transposed(),
                           tiles = tiles_of(format, 128, rule);
        const SlowQuantized by_rows = expected(x, cols, along_rows), by_columns = expected(x, cols, along_columns),
                            by_tiles = expected(x, cols, tiles);
        for (Backend* device : devices()) {
          const Tensor input = copied(*device, drawn);
          const auto target = [&](const Quantization& how) { return stale(*device, {padded, cols}, how); };
          const QuantizedTensor row = target(along_rows), column = target(along_columns), tile = target(tiles), both = target(along_rows),
                                second = target(along_columns);
          for (const QuantizedTensor& out : {row, column, tile}) device->run(Quantize{.x = input, .out = out});
          device->run(Quantize{.x = input, .out = both, .second = second});
          expect_equal(row, by_rows), expect_equal(both, by_rows);
          expect_equal(column, by_columns), expect_equal(second, by_columns);
          expect_equal(tile, by_tiles);
        }
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace mantissa::test::quantization_bits_test
