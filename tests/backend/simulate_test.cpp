// Formats without codes against a restatement that shares no code with them: tables of values and search, scales by their definition, and
// NVFP4's in the order of Transformer Engine's reference.
#include <gmock/gmock.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <set>

#include "files.h"
#include "quantized_matrices.h"
#include "slow_formats.h"

namespace mantissa::test::simulate_test {

constexpr float kLargest = std::numeric_limits<float>::max();

struct Matrix {
  int64_t rows, columns;
  std::vector<float> data;
  float& at(int64_t r, int64_t c) { return data[static_cast<size_t>(r * columns + c)]; }
};

float rounded_as(Dtype dtype, float x) { return dtype == Dtype::bf16 ? to_float(to_bf16(x)) : x; }

// ---- the restatement

// The elements below and above |y|, of a table of magnitudes.
std::array<double, 2> neighbors(const std::vector<double>& table, double y) {
  const auto above = std::ranges::lower_bound(table, y);
  if (above == table.end()) return {table.back(), table.back()};
  return *above == y ? std::array{y, y} : std::array{*(above - 1), *above};
}

uint32_t word_of(const RoundingDraws& draws, int64_t r, int64_t c) {
  const int64_t row = draws.row_places.empty() ? r : draws.row_places[static_cast<size_t>(r)],
                column = draws.column_places.empty() ? c : draws.column_places[static_cast<size_t>(c)];
  const uint64_t number = draws.first + static_cast<uint64_t>(row * draws.columns + column);
  return random_words({draws.seed, RngStream::rounding}, draws.what, number / 4)[number % 4];
}

struct Plain {
  const Simulation& how;
  const RoundingDraws& draws;
  std::vector<double> table = free_magnitudes(how.element.exponent_bits, how.element.mantissa_bits);

  double element(double y, int64_t r, int64_t c) const {
    const auto [below, above] = neighbors(table, std::abs(y));
    const double rest = above == below ? 0.0 : (std::abs(y) - below) / (above - below);
    bool up = rest > 0.5;
    if (how.rounding == Rounding::stochastic) {
      up = static_cast<double>(word_of(draws, r, c)) < rest * 0x1p32;
    } else if (rest == 0.5) {
      up = std::fmod(below / (above - below), 2.0) == 1.0;
    }
    return std::copysign(up ? above : below, y);
  }

  int exponent(float amax) const {
    if (amax == 0.0F) return -127;
    const double largest = table.back(), wide = double{amax};
    const int emax = std::ilogb(largest), floor = std::ilogb(wide);
    int out = floor - emax;
    if (how.rule == ScaleRule::rceil) out += wide > std::ldexp(largest, out) ? 1 : 0;
    if (how.rule == ScaleRule::ceil) out += wide > std::ldexp(1.0, floor) ? 1 : 0;
    if (how.rule == ScaleRule::even) {
      const double half = std::ldexp(1.0, floor - how.element.mantissa_bits - 1);
      out += std::ilogb(wide + half) - floor;
    }
    return std::clamp(out, -127, 127);
  }
};

float e4m3(float x) { return std::bit_cast<float>(E4M3::decode(E4M3::encode(std::bit_cast<uint32_t>(x), 127), 127)); }

// Returns true if a number below 32 has an odd number of bits.
bool odd(int64_t x) {
  bool out = false;
  for (int64_t bit = 1; bit < 32; bit *= 2) out = out != ((x & bit) != 0);
  return out;
}

// Transforms by the matrix, row by row or column by column.
Matrix transformed(Matrix x, const Simulation& how, Dtype dtype) {
  const int64_t n = how.hadamard;
  if (n == 0) return x;
  Matrix out = x;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.columns; ++c) {
      const int64_t at = how.contraction == 1 ? c : r, begin = at / n * n;
      double sum = 0.0;
      for (int64_t i = begin; i < begin + n; ++i) {
        const double value = double{how.contraction == 1 ? x.at(r, i) : x.at(i, c)};
        const bool minus = (0x6A88D7E8U >> (i - begin) & 1U) != 0;
        const bool negative = odd((i - begin) & (at - begin));
        sum += minus == negative ? value : -value;
      }
      out.at(r, c) = rounded_as(dtype, static_cast<float>(sum * (n == 16 ? 0.25 : std::sqrt(2.0) / 8)));
    }
  }
  return out;
}

Matrix restated(Matrix x, const Simulation& how, Dtype dtype, Dtype to, const RoundingDraws& draws) {
  x = transformed(x, how, dtype);
  const Plain plain{how, draws};
  const auto amax_of = [&](int64_t row, int64_t rows, int64_t column, int64_t columns) {
    float amax = 0.0F;
    for (int64_t r = row; r < std::min(x.rows, row + rows); ++r) {
      for (int64_t c = column; c < std::min(x.columns, column + columns); ++c) {
        amax = std::isfinite(x.at(r, c)) ? std::max(amax, std::abs(x.at(r, c))) : std::numeric_limits<float>::infinity();
        if (std::isinf(amax)) return amax;
      }
    }
    return amax;
  };
  const float tensor_amax = amax_of(0, x.rows, 0, x.columns), largest = static_cast<float>(plain.table.back());
  Matrix out = x;
  for (int64_t r = 0; r < x.rows; ++r) {
    for (int64_t c = 0; c < x.columns; ++c) {
      const float amax = amax_of(r / how.block_rows * how.block_rows, how.block_rows, c / how.block_cols * how.block_cols, how.block_cols);
      float value = std::numeric_limits<float>::quiet_NaN();
      if (how.scale == SimulatedScale::e8m0 && std::isfinite(amax)) {
        const int exponent = plain.exponent(amax);
        value = static_cast<float>(std::ldexp(plain.element(std::ldexp(double{x.at(r, c)}, -exponent), r, c), exponent));
      } else if (how.scale == SimulatedScale::e4m3 && std::isfinite(tensor_amax)) {
        float encode = 448.0F * largest / tensor_amax;
        encode = std::min(encode, kLargest);
        const float decode = 1.0F / encode, multiplier = encode * (1.0F / largest);
        const float scale = e4m3(std::min(amax * multiplier, 448.0F));
        const float element_encode = std::min(1.0F / (scale * decode), kLargest);
        const float y = std::clamp(x.at(r, c) * element_encode, -largest, largest);
        value = static_cast<float>(plain.element(double{y}, r, c)) * scale * decode;
      }
      out.at(r, c) = rounded_as(to, value);
    }
  }
  return out;
}

// ---- the cases

// Bits drawn at random are NaN or Inf in one of 128 elements.
std::vector<float> drawn(int64_t count, uint32_t what, bool any_bits) {
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) {
    const auto words = random_words({.seed = 31}, what, static_cast<uint64_t>(i));
    const float normal = random_normal({.seed = 32}, what, static_cast<uint64_t>(i));
    const float spread = std::ldexp(normal, static_cast<int>(words[1] % 17) - 8);
    out.push_back(any_bits ? std::bit_cast<float>(words[0]) : words[2] % 11 == 0 ? std::copysign(0.0F, normal) : spread);
  }
  return out;
}

Tensor uploaded(Backend& device, Dtype dtype, int64_t rows, int64_t columns, const std::vector<float>& from) {
  const Tensor wide = from_host(device, Dtype::f32, {rows, columns}, from.data());
  return converted(wide, dtype);
}

std::vector<float> floats(const Tensor& x) { return to_host<float>(converted(x, Dtype::f32)); }

::testing::AssertionResult same_values(const std::vector<float>& found, const std::vector<float>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same =
        std::isnan(expected[i]) ? std::isnan(found[i]) : std::bit_cast<uint32_t>(found[i]) == std::bit_cast<uint32_t>(expected[i]);
    if (!same) return ::testing::AssertionFailure() << '[' << i << "] is " << found[i] << ", expected " << expected[i];
  }
  return ::testing::AssertionSuccess();
}

struct Case {
  int64_t rows, columns;
  Dtype dtype, to;
  Simulation how;
  int64_t more_rows = 0;
  bool any_bits = false;
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << '+' << c.more_rows << 'x' << c.columns << ' ' << c.dtype << " to " << c.to << ' ' << c.how << " contracts "
             << c.how.contraction << (c.any_bits ? " any bits" : "");
}

// Draws element, block, shape, rule, rounding and transform by the number of the case.
Case case_of(uint32_t number) {
  const auto a = random_words({.seed = 33}, number, 0), b = random_words({.seed = 33}, number, 1),
             d = random_words({.seed = 33}, number, 2);
  Case c{.rows = 1 + a[0] % 40, .columns = 1 + a[1] % 300, .dtype = a[2] % 2 == 0 ? Dtype::bf16 : Dtype::f32, .to = Dtype::f32, .how = {}};
  if (a[3] % 2 == 0) c.to = c.dtype;
  Simulation& how = c.how;
  how.element = {1 + static_cast<int32_t>(b[0] % 7), static_cast<int32_t>(b[1] % 8)};
  if (number % 3 == 0) how.element = {2, 1};
  how.block_rows = b[2] % 2 == 0 ? 1 : 1 + b[2] % 19;
  how.block_cols = 1 + b[3] % 35;
  how.rule = kUsualRules[d[0] % 4];
  how.scale = d[1] % 2 == 0 ? SimulatedScale::e8m0 : SimulatedScale::e4m3;
  if (how.scale == SimulatedScale::e4m3) how.rule = ScaleRule::rceil;
  how.rounding = d[2] % 3 == 0 ? Rounding::stochastic : Rounding::nearest;
  how.contraction = static_cast<int>(d[3] % 2);
  c.any_bits = number % 5 == 0 && how.scale == SimulatedScale::e8m0;
  c.more_rows = number % 7 == 0 ? 1 + static_cast<int64_t>(d[3] / 2 % 9) : 0;
  if (number % 4 != 1) return c;
  how.hadamard = number % 8 == 1 ? 16 : 32;
  if (how.contraction == 1) c.columns = how.hadamard * (1 + a[1] % 3 * 33);
  c.more_rows = how.contraction == 0 ? round_up(c.rows, how.hadamard) - c.rows : static_cast<int64_t>(d[3] / 2 % 3);
  return c;
}

RoundingDraws draws_of(const Case& c) { return {.seed = 77, .what = 5, .first = 1234567, .columns = c.columns}; }

// Draws of a share of twice as many columns, in any order. Rows of tokens lie anywhere, those of padding before the first one, and numbers
// of elements wrap.
RoundingDraws draws_of_share(const Case& c) {
  RoundingDraws out{.seed = 77, .what = 5, .first = 40, .columns = 2 * c.columns};
  for (int64_t r = 0; r < c.rows + c.more_rows; ++r) out.row_places.push_back(r % 3 == 1 ? -r : r * 1000000007);
  for (int64_t i = 0; i < c.columns; ++i) out.column_places.push_back((i * 7 + 3) % (2 * c.columns));
  return out;
}

class Simulated : public BackendTest {
 protected:
  std::vector<float> run(Backend& device, const Case& c, const std::vector<float>& from, const RoundingDraws& draws) {
    const Tensor x = uploaded(device, c.dtype, c.rows, c.columns, from), out = empty(device, c.to, {c.rows + c.more_rows, c.columns});
    device.run(Simulate{.x = x, .out = out, .how = c.how, .draws = draws});
    return floats(out);
  }
  // Runs on bf16, to fp32.
  std::vector<float> run(const Simulation& how, int64_t rows, int64_t columns, const std::vector<float>& from) {
    return run(fast(), {.rows = rows, .columns = columns, .dtype = Dtype::bf16, .to = Dtype::f32, .how = how}, from, {});
  }
};

TEST_F(Simulated, AnyFormatBlockAndShapeHasTheValuesOfItsDefinition) {
  for (uint32_t number = 0; number < 400; ++number) {
    const Case c = case_of(number);
    std::vector<float> from = drawn(c.rows * c.columns, number, c.any_bits);
    for (float& value : from)
      value = number % 10 == 3   ? std::ldexp(value, -100 - static_cast<int>(number) % 37)
              : number % 50 == 7 ? std::copysign(0.0F, value)
                                 : value;
    Matrix x{c.rows + c.more_rows, c.columns, from};
    for (float& value : x.data) value = rounded_as(c.dtype, value);
    x.data.resize(static_cast<size_t>(x.rows * x.columns));
    const RoundingDraws draws = number / 8 % 2 == 0 ? draws_of(c) : draws_of_share(c);
    const Matrix expected = restated(x, c.how, c.dtype, c.to, draws);
    for (Backend* device : {&reference(), &fast()}) {
      ASSERT_TRUE(same_values(run(*device, c, from, draws), expected.data)) << "case " << number << ": " << c << " on " << device->name();
    }
  }
}

// Formats that have codes give the values of codes, whatever the bits, poisoned blocks and overflow included.
TEST_F(Simulated, FormatsWithCodesHaveTheValuesOfFakeQuantization) {
  for (const auto& [format, element] : {std::pair{Format::e4m3, FreeElement{4, 3}}, {Format::e5m2, {5, 2}}, {Format::e2m1, {2, 1}}}) {
    for (const ScaleRule rule : kUsualRules) {
      for (const auto& [r, c] : {std::pair<int64_t, int64_t>{1, 32}, {32, 1}, {32, 32}, {1, 16}, {8, 2}}) {
        for (const Dtype dtype : {Dtype::bf16, Dtype::f32}) {
          const Tensor x = uploaded(fast(), dtype, 64, 256, drawn(64 * 256, 900 + static_cast<uint32_t>(r), true));
          const Tensor expected = empty_like(x), found = empty_like(x);
          fast().run(FakeQuantize{.x = x, .out = expected, .how = {format, r, c, rule}});
          fast().run(Simulate{.x = x, .out = found, .how = {.element = element, .block_rows = r, .block_cols = c, .rule = rule}});
          ASSERT_TRUE(same_bits(found, expected)) << format_name(format) << ' ' << r << 'x' << c << ' ' << scale_rule_name(rule);
        }
      }
    }
  }
}

constexpr Simulation kNvfp4{.element = {2, 1}, .block_rows = 1, .block_cols = 16, .scale = SimulatedScale::e4m3};

// amax 6: the encoding scale of the tensor is 448, so a block with amax 6 has scale 448, and 1 stands for itself but for the rounding of
// 1/448.
TEST_F(Simulated, Nvfp4OfElementsHasThem) {
  std::vector<float> x(32);
  x[0] = 6.0F, x[1] = -3.0F, x[2] = 0.5F, x[3] = -0.0F, x[4] = 1.25F, x[5] = 0.25F;
  x[16] = 0.75F;  // a block of its own: scale 56, element 6
  const std::vector<float> y = run(kNvfp4, 1, 32, x);
  EXPECT_NEAR(y[0], 6.0, 6e-7);
  EXPECT_NEAR(y[1], -3.0, 3e-7);
  EXPECT_NEAR(y[2], 0.5, 5e-8);
  EXPECT_TRUE(y[3] == 0.0F && std::signbit(y[3]));
  EXPECT_NEAR(y[4], 1.0, 1e-7) << "a tie, to the even element";
  EXPECT_EQ(y[5], 0.0F);
  EXPECT_NEAR(y[16], 0.75, 1e-7);
}

TEST_F(Simulated, ANanOrInfOfABlockOrOfATensorWithTwoLevelsLeavesNoNumber) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(32, 1.0F);
    x[3] = -bad;
    for (const float value : run(kNvfp4, 1, 32, x)) EXPECT_TRUE(std::isnan(value));
    const std::vector<float> y = run({.element = {3, 2}, .block_cols = 16}, 1, 32, x);
    for (size_t i = 0; i < 32; ++i) EXPECT_EQ(std::isnan(y[i]), i < 16) << i;
  }
}

// The second amax is that of the transformed values: a matrix whose largest element is spread has another scale.
TEST_F(Simulated, TheScaleOfATensorIsThatOfTheTransformedOne) {
  std::vector<float> x(256, 0.0F);
  for (size_t i = 0; i < 16; ++i) x[i * 16] = 64.0F;
  Simulation how = kNvfp4;
  how.hadamard = 16;
  const std::vector<float> y = run(how, 16, 16, x);
  for (const float value : y) EXPECT_EQ(std::abs(value), 16.0F) << "64 / sqrt(16), which is exact if its own amax gives the scale";
}

// Both operands of a GEMM are transformed along its contraction, so their product stays.
TEST_F(Simulated, TheProductOfTransformedOperandsIsThatOfTheOperands) {
  for (const int64_t length : {int64_t{16}, int64_t{32}}) {
    constexpr int64_t kDepth = 64, kWidth = 24;
    const Simulation fine{.element = {7, 7}, .block_cols = 1, .hadamard = length, .contraction = 0};
    std::array<std::vector<float>, 2> plain, turned;
    for (uint32_t i = 0; i < 2; ++i) {
      plain[i] = floats(uploaded(fast(), Dtype::bf16, kDepth, kWidth, drawn(kDepth * kWidth, 40 + i, false)));
      turned[i] = run(fine, kDepth, kWidth, plain[i]);
    }
    for (size_t row = 0; row < kWidth; ++row) {
      for (size_t column = 0; column < kWidth; ++column) {
        double expected = 0.0, found = 0.0, size = 0.0;
        for (size_t k = 0; k < kDepth; ++k) {
          expected += double{plain[0][k * kWidth + row]} * double{plain[1][k * kWidth + column]};
          found += double{turned[0][k * kWidth + row]} * double{turned[1][k * kWidth + column]};
          size += std::abs(double{turned[0][k * kWidth + row]} * double{turned[1][k * kWidth + column]});
        }
        ASSERT_NEAR(found, expected, 0x1p-7 * size) << length;
      }
    }
  }
}

// ---- random rounding

// 10^4 draws of each of 256 elements: every mean lies within 4 standard errors, and no more of them beyond 3 than there should.
TEST_F(Simulated, RandomRoundingIsUnbiased) {
  constexpr int kDraws = 10000, kElements = 256;
  for (Simulation how : {Simulation{.element = {2, 1}, .block_cols = 32}, kNvfp4, Simulation{.element = {3, 0}, .block_cols = 8}}) {
    how.rounding = Rounding::stochastic;
    std::vector<float> x = floats(uploaded(fast(), Dtype::bf16, 1, kElements, drawn(kElements, 60, false)));
    const Tensor on_device = uploaded(fast(), Dtype::bf16, 1, kElements, x), out = empty(fast(), Dtype::f32, {1, kElements});
    std::vector<double> sums(kElements), squares(kElements);
    std::vector<float> least(kElements, kLargest), most(kElements, -kLargest);
    for (int draw = 0; draw < kDraws; ++draw) {
      const uint64_t first = static_cast<uint64_t>(draw) * kElements;
      fast().run(Simulate{.x = on_device, .out = out, .how = how, .draws = {.seed = 8, .what = 1, .first = first, .columns = kElements}});
      const std::vector<float> y = to_host<float>(out);
      for (size_t i = 0; i < y.size(); ++i) {
        sums[i] += double{y[i]}, squares[i] += double{y[i]} * double{y[i]};
        least[i] = std::min(least[i], y[i]), most[i] = std::max(most[i], y[i]);
      }
    }
    int far = 0;
    for (size_t i = 0; i < kElements; ++i) {
      const double mean = sums[i] / kDraws, variance = std::max(0.0, squares[i] / kDraws - mean * mean);
      const double error = std::sqrt(variance / kDraws), allowed = 4 * error + 1e-6 * std::abs(double{x[i]});
      const bool is_largest = std::abs(mean) < std::abs(double{x[i]}) && least[i] == most[i];  // beyond the rounded scale of its block
      if (!is_largest) {
        EXPECT_NEAR(mean, double{x[i]}, allowed) << how << " element " << i;
      }
      far += !is_largest && std::abs(mean - double{x[i]}) > 3 * error + 1e-6 * std::abs(double{x[i]});
    }
    EXPECT_LE(far, 4);
  }
}

TEST_F(Simulated, DrawsAreTheSameOnAnyNumberOfThreads) {
  Case c{
      .rows = 1101, .columns = 93, .dtype = Dtype::bf16, .to = Dtype::bf16, .how = {.element = {2, 1}, .block_rows = 3, .block_cols = 7}};
  c.how.rounding = Rounding::stochastic;
  const std::vector<float> from = drawn(c.rows * c.columns, 70, false);
  std::vector<std::vector<float>> found;
  for (const int threads : {1, 2, 5}) {
    const Threads scope(threads);
    found.push_back(run(fast(), c, from, draws_of(c)));
  }
  EXPECT_TRUE(same_elements(found[1], found[0]));
  EXPECT_TRUE(same_elements(found[2], found[0]));
}

// Rows of tokens lie anywhere, those of padding before the first one, and numbers of elements wrap.
TEST_F(Simulated, RowsHaveTheDrawsOfTheirPlaces) {
  for (const int64_t columns : {3, 8, 61, 258, 600}) {
    Case c{.rows = 5, .columns = columns, .dtype = Dtype::f32, .to = Dtype::f32, .how = {.element = {2, 1}, .block_cols = 16}};
    c.how.rounding = Rounding::stochastic;
    const std::vector<float> from = drawn(c.rows * c.columns, 74, false);
    RoundingDraws draws{.seed = 77, .what = 5, .first = 40, .columns = columns, .row_places = {4, -1, -2, 1000000007, 0}};
    EXPECT_TRUE(same_values(run(fast(), c, from, draws), run(reference(), c, from, draws))) << columns;
    EXPECT_TRUE(same_values(run(fast(), c, from, draws), restated({c.rows, columns, from}, c.how, c.dtype, c.to, draws).data)) << columns;
  }
}

TEST_F(Simulated, OtherSeedsTensorsAndElementsAreOtherDraws) {
  Case c{.rows = 8, .columns = 64, .dtype = Dtype::bf16, .to = Dtype::f32, .how = {.element = {2, 1}, .block_cols = 16}};
  c.how.rounding = Rounding::stochastic;
  const std::vector<float> from = drawn(c.rows * c.columns, 72, false);
  const RoundingDraws one = draws_of(c);
  RoundingDraws seed = one, what = one, first = one;
  seed.seed ^= uint64_t{1} << 40;
  ++what.what;
  first.first += uint64_t{1} << 35;
  const std::vector<float> expected = run(fast(), c, from, one);
  for (const RoundingDraws& other : {seed, what, first}) {
    const std::vector<float> found = run(fast(), c, from, other);
    int64_t different = 0;
    for (size_t i = 0; i < found.size(); ++i) different += found[i] != expected[i];
    EXPECT_GT(different, 40);
  }
}

// ---- the error

// Some leave rows out: values are the same, and a block counts with any of its rows.
TEST_F(Simulated, ErrorIsThatOfWhatIsRounded) {
  using Part = QuantizationError::Part;
  for (uint32_t number = 0; number < 60; ++number) {
    Case c = case_of(number);
    if (c.any_bits) continue;
    const int64_t rows = c.rows + c.more_rows;
    std::vector<int32_t> kept(static_cast<size_t>(rows), 0);
    for (size_t i = 0; i < kept.size(); ++i) kept[i] = number / 8 % 2 == 0 && i % 7 > 1 ? -1 : static_cast<int32_t>(i);
    const std::vector<float> from = drawn(c.rows * c.columns, number, false);
    const Tensor x = uploaded(fast(), c.dtype, c.rows, c.columns, from), out = empty(fast(), c.to, {rows, c.columns});
    const Tensor error = empty(fast(), Dtype::f64, {QuantizationError::size}),
                 counted = number / 8 % 2 == 0 ? from_host(fast(), Dtype::i32, {rows}, kept.data()) : Tensor();
    fast().run(Simulate{.x = x, .out = out, .how = c.how, .draws = draws_of(c), .error = error, .rows = counted});
    const std::vector<double> sums = to_host<double>(error);
    const std::vector<float> y = floats(out);
    EXPECT_TRUE(same_values(run(fast(), c, from, draws_of(c)), y)) << c;
    Matrix source{rows, c.columns, floats(x)};
    source.data.resize(y.size());
    source = transformed(source, c.how, c.dtype);
    double signal = 0.0, noise = 0.0, flushed = 0.0, amax = 0.0, elements = 0.0, blocks = 0.0;
    std::set<int64_t> of_rows;
    for (size_t i = 0; i < y.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / c.columns;
      if (kept[static_cast<size_t>(row)] < 0) continue;
      const double value = double{source.data[i]};
      signal += value * value, noise += (value - double{y[i]}) * (value - double{y[i]});
      flushed += value != 0.0 && y[i] == 0.0F, amax = std::max(amax, std::abs(value)), elements += 1.0;
      of_rows.insert(row / c.how.block_rows);
    }
    for (size_t i = Part::scales; i < sums.size(); ++i) blocks += sums[i];
    EXPECT_NEAR(sums[Part::signal], signal, 1e-12 * signal) << c;
    EXPECT_NEAR(sums[Part::noise], noise, 1e-12 * noise) << c;
    EXPECT_EQ(sums[Part::flushed], flushed) << c;
    EXPECT_EQ(sums[Part::amax], amax) << c;
    EXPECT_EQ(sums[Part::elements], elements) << c;
    EXPECT_EQ(blocks, static_cast<double>(std::ssize(of_rows) * ceil_div(c.columns, c.how.block_cols))) << c;
  }
  const Tensor x = empty(fast(), Dtype::f32, {8, 32}), rows = empty(fast(), Dtype::i32, {8});
  EXPECT_THAT(error_of([&] { fast().run(Simulate{.x = x, .out = empty_like(x), .how = kNvfp4, .rows = rows}); }).what(),
              ::testing::HasSubstr("rows needs error"));
}

// Errors are those of codes: clipped elements and scales, too.
TEST_F(Simulated, ErrorOfAFormatWithCodesIsThatOfItsCodes) {
  for (const ScaleRule rule : kUsualRules) {
    const Tensor x = uploaded(fast(), Dtype::bf16, 64, 96, drawn(64 * 96, 80, false)), out = empty_like(x);
    const Tensor expected = empty(fast(), Dtype::f64, {QuantizationError::size}), found = empty_like(expected);
    fast().run(QuantizationError{.x = x, .q = quantized(x, {Format::e2m1, 1, 32, rule}), .out = expected});
    fast().run(Simulate{.x = x, .out = out, .how = {.element = {2, 1}, .rule = rule}, .error = found});
    EXPECT_TRUE(close(values(found), values(expected), 1e-12)) << scale_rule_name(rule);
  }
}

}  // namespace mantissa::test::simulate_test
