// The error of a weight, divided by its cause, and its worst block. Figures are worked out by hand for codes whose scale is 1.
#include "metrics/weight_errors.h"

#include <gmock/gmock.h>

#include <cmath>

#include "base/parallel.h"
#include "kernel_backends.h"
#include "mantissa/backend/functions.h"
#include "testing.h"

namespace mantissa::test::weight_errors_test {

class WeightErrorsTest : public OnEachBackend {
 protected:
  // x [rows, columns], zeros but for the values given.
  Tensor matrix(int64_t rows, int64_t columns, std::vector<double> given) {
    given.resize(static_cast<size_t>(rows * columns));
    return tensor_of(device(), Dtype::bf16, {rows, columns}, given);
  }
  WeightError measured(const Tensor& x, const Quantization& how) {
    WeightErrors errors(1);
    errors.add(x, quantized(x, how));
    return errors.result();
  }
  // Values of many magnitudes.
  Tensor random(int64_t rows, int64_t columns) {
    std::vector<double> values(static_cast<size_t>(rows * columns));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto words = random_words({.seed = 5, .stream = RngStream::test}, 1, i);
      values[i] = std::ldexp(static_cast<double>(words[0]) / 4294967296.0 - 0.5, static_cast<int>(words[1] % 12));
    }
    return tensor_of(device(), Dtype::bf16, {rows, columns}, values);
  }
};

INSTANTIATE_TEST_SUITE_P(, WeightErrorsTest, ::testing::ValuesIn(tested_backends()), backend_of);

constexpr Quantization kFloor{Format::e4m3, 1, 32, ScaleRule::floor};

// 500 and 450 are beyond 448, the largest code; 2^-10 is half of the least code and goes to 0, which is exact for a 0; 1.0625 lies between
// 1 and 1.125.
TEST_P(WeightErrorsTest, EachElementHasOneCause) {
  const WeightError error = measured(matrix(1, 32, {-500, 450, 448, 0x1p-10, -0x1p-10, 1.0625}), kFloor);
  ASSERT_TRUE(error.parts);
  EXPECT_EQ(error.parts->scale, 52.0 * 52 + 2.0 * 2);
  EXPECT_EQ(error.parts->dead_zone, 2 * 0x1p-20);
  EXPECT_EQ(error.parts->grid, 0.0625 * 0.0625);
  EXPECT_EQ(error.noise, error.parts->total());
  EXPECT_EQ(error.elements, 32);
  EXPECT_EQ(error.bytes, 33);
  EXPECT_EQ(error.figures.clipped, 2.0 / 32);
  EXPECT_EQ(error.figures.flushed, 2.0 / 32);
}

TEST(WeightErrors, ScalesOfNvfp4AreToldAsExponents) {
  std::vector<double> parts(QuantizationError::size, 0.0), expected = parts;
  const auto scale = [](std::vector<double>& of, size_t code) -> double& { return of[QuantizationError::scales + code]; };
  parts[QuantizationError::noise] = expected[QuantizationError::noise] = 3.0;
  scale(parts, 0x01) = 1.0, scale(parts, 0x38) = 2.0, scale(parts, 0x3F) = 4.0, scale(parts, 0x7F) = 8.0;
  scale(expected, 127 - 9 - 8) = 1.0, scale(expected, 127 - 8) = 6.0, scale(expected, 255) = 8.0;  // 2^-9, 1 and 1.875, NaN
  EXPECT_EQ(with_exponents(parts, {Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -8}), expected);
}

TEST_P(WeightErrorsTest, PartsAddUpToTheNoise) {
  const Tensor x = random(200, 256);
  for (const Quantization& how :
       {Quantization{Format::e2m1, 1, 32, ScaleRule::flashinfer}, Quantization{Format::e2m1, 1, 32, ScaleRule::floor},
        Quantization{Format::e4m3, 32, 32}, Quantization{Format::e5m2, 1, 128}}) {
    const WeightError error = measured(x, how);
    EXPECT_NEAR(error.parts->total(), error.noise, 1e-12 * error.noise) << how;
    EXPECT_GT(error.parts->grid, 0.0) << how;
    EXPECT_EQ(error.parts->dead_zone > 0.0, error.figures.flushed > 0.0) << how;
    EXPECT_EQ(error.parts->scale > 0.0, error.figures.clipped > 0.0) << how;
  }
}

// 1.0625 is no code beside ones, and goes to 1. Row 130 is in the third run of 64 rows.
TEST_P(WeightErrorsTest, TheWorstBlockIsNamedByItsFirstElement) {
  std::vector<double> values(140 * 96, 1.0);
  for (const size_t at : {7U * 96 + 1, 130U * 96 + 40, 130U * 96 + 63, 139U * 96 + 95}) values[at] = 1.0625;
  const Tensor x = tensor_of(device(), Dtype::bf16, {140, 96}, values);
  const WeightError rows = measured(x, {Format::e4m3});
  ASSERT_TRUE(rows.worst_block);
  EXPECT_EQ(rows.worst_block->row, 130);
  EXPECT_EQ(rows.worst_block->column, 32);
  EXPECT_NEAR(rows.worst_block->sqnr_db, 10 * std::log10((30 + 2 * 1.0625 * 1.0625) / (2 * 0.0625 * 0.0625)), 1e-9);
  const WeightError tiles = measured(x, {Format::e4m3, 32, 32});
  EXPECT_EQ(tiles.worst_block->row, 128);
  EXPECT_EQ(tiles.worst_block->column, 32);
  EXPECT_FALSE(measured(matrix(2, 32, {1, 2, 4}), {Format::e4m3}).worst_block) << "there is no error";
}

// Rows 2, 70 and 131 have the same block at two places each; the pieces that threads sum are 64 rows.
TEST_P(WeightErrorsTest, OfEquallyBadBlocksTheFirstIsNamed) {
  std::vector<double> values(140 * 96, 1.0);
  for (const size_t row : {2U, 70U, 131U})
    for (const size_t column : {32U, 64U}) values[row * 96 + column] = 1.0625;
  const Tensor x = tensor_of(device(), Dtype::bf16, {140, 96}, values);
  WeightErrors errors(2);
  for (int expert = 0; expert < 2; ++expert) errors.add(x, quantized(x, {Format::e4m3}));
  const WeightError error = errors.result();
  ASSERT_TRUE(error.worst_block && error.figures.worst_expert);
  EXPECT_EQ(error.worst_block->row, 2);
  EXPECT_EQ(error.worst_block->column, 32);
  EXPECT_EQ(error.figures.worst_expert->expert, 0);
}

// The last tile has 8 rows.
TEST_P(WeightErrorsTest, RowsOfABlockThatIsNotWholeCount) {
  std::vector<double> values(40 * 32, 1.0);
  values[39 * 32 + 31] = 1.0625;
  const WeightError error = measured(tensor_of(device(), Dtype::bf16, {40, 32}, values), {Format::e4m3, 32, 32});
  ASSERT_TRUE(error.parts && error.worst_block);
  EXPECT_EQ(error.parts->grid, 0.0625 * 0.0625);
  EXPECT_EQ(error.worst_block->row, 32);
}

TEST_P(WeightErrorsTest, MatricesOfExpertsAreOneBelowTheOther) {
  WeightErrors errors(3);
  for (const double value : {1.0, 1.0625, 1.03125}) {
    const Tensor x = matrix(2, 32, {448, 1, value});
    errors.add(x, quantized(x, kFloor));
  }
  const WeightError error = errors.result();
  ASSERT_TRUE(error.figures.worst_expert && error.worst_block);
  EXPECT_EQ(error.figures.worst_expert->expert, 1);
  EXPECT_EQ(error.worst_block->row, 2);
  EXPECT_EQ(error.elements, 3 * 2 * 32);
  EXPECT_EQ(error.noise, 0.0625 * 0.0625 + 0.03125 * 0.03125);
  EXPECT_FALSE(measured(matrix(2, 32, {448, 1.0625}), kFloor).figures.worst_expert);
}

TEST_P(WeightErrorsTest, ThreadsChangeNoBit) {
  const Tensor x = random(500, 128);
  const auto on = [&](int threads) {
    set_num_threads(threads);
    const WeightError error = measured(x, {Format::e2m1, 1, 32, ScaleRule::flashinfer});
    set_num_threads(0);
    return std::vector{error.signal,       error.noise,       error.parts->dead_zone,
                       error.parts->scale, error.parts->grid, error.worst_block->sqnr_db};
  };
  EXPECT_EQ(on(1), on(5));
}

TEST(WeightErrorsOfValues, FormatsWithoutCodesHaveFiguresAlone) {
  const auto device = make_backend("cpu_reference");
  const Tensor x = tensor_of(*device, Dtype::bf16, {1, 16}, std::vector<double>{6, 2.5, 0.25, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  WeightErrors errors(1);
  errors.add(x, Simulation{.element = {.exponent_bits = 2, .mantissa_bits = 1}, .block_rows = 1, .block_cols = 16});
  const WeightError error = errors.result();
  EXPECT_EQ(error.noise, 0.25 + 0.0625);
  EXPECT_EQ(error.figures.flushed, 1.0 / 16);
  EXPECT_EQ(error.bytes, 8 + 1);
  EXPECT_FALSE(error.parts || error.worst_block);
}

}  // namespace mantissa::test::weight_errors_test
