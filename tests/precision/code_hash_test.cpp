#include <gtest/gtest.h>

#include "base/hash.h"
#include "checkpoint/precision_setup.h"
#include "files.h"
#include "testing.h"

namespace mantissa::code_hash_test {

struct Case {
  Quantization how;
  Shape shape;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.how << " of " << c.shape; }

class CodeHash : public test::BackendTest, public ::testing::WithParamInterface<Case> {
 protected:
  QuantizedTensor codes() {
    const auto& [how, shape] = GetParam();
    QuantizedTensor out = empty_quantized(fast(), shape, how);
    fast().run(Quantize{.x = test::random_tensor(fast(), Dtype::bf16, shape, 3), .out = out});
    return out;
  }
  CodeSums whole() { return code_sums(codes(), {.rows = GetParam().shape[0], .columns = GetParam().shape[1]}); }
};

// Columns [begin, end) as a tensor of its own.
QuantizedTensor columns(const QuantizedTensor& x, int64_t begin, int64_t end) {
  QuantizedTensor out = empty_quantized(x.device(), {x.shape[0], end - begin}, x.how);
  const auto copy = [&](const Tensor& from, const Tensor& to) {
    const int64_t first = begin * from.dim(1) / x.shape[1], width = from.dim(1);
    const std::vector<uint8_t> all = test::bytes_of(from);
    std::vector<uint8_t> part;
    for (int64_t i = 0; i < from.dim(0); ++i) std::copy_n(all.begin() + i * width + first, to.dim(1), std::back_inserter(part));
    to.device().upload(part.data(), to);
  };
  copy(x.codes, out.codes);
  copy(x.scales, out.scales);
  return out;
}

// Hashes cell by cell and byte by byte, from the definition.
TEST_P(CodeHash, IsTheSumOverCells) {
  const QuantizedTensor x = codes();
  const auto& [how, shape] = GetParam();
  const Tensor decoded = empty(fast(), Dtype::f32, shape);
  fast().run(Dequantize{.x = x, .out = decoded});
  const int64_t rows = std::max<int64_t>(32, how.block_rows), cols = (31 + how.block_cols) / how.block_cols * how.block_cols,
                per_byte = shape[1] / x.codes.dim(1);
  const int64_t cells = (shape[1] + cols - 1) / cols, scales_per_row = x.scales.dim(1);
  const std::vector<uint8_t> codes = test::bytes_of(x.codes), scales = test::bytes_of(x.scales), floats = test::bytes_of(decoded);
  CodeSums sums;
  for (int64_t r = 0; r < shape[0]; r += rows) {
    for (int64_t c = 0; c < shape[1]; c += cols) {
      std::string bytes, values;
      const int64_t row_end = std::min(r + rows, shape[0]), col_end = std::min(c + cols, shape[1]);
      for (int64_t i = r; i < row_end; ++i)
        for (int64_t j = c; j < col_end; j += per_byte)
          bytes += static_cast<char>(codes[static_cast<size_t>((i * shape[1] + j) / per_byte)]);
      for (int64_t i = r; i < row_end; i += how.block_rows)
        for (int64_t j = c; j < col_end; j += how.block_cols)
          bytes += static_cast<char>(scales[static_cast<size_t>(i / how.block_rows * scales_per_row + j / how.block_cols)]);
      for (int64_t i = r; i < row_end; ++i)
        values.append(floats.begin() + 4 * (i * shape[1] + c), floats.begin() + 4 * (i * shape[1] + col_end));
      const auto seed = static_cast<uint64_t>(r / rows * cells + c / cols);
      sums.codes += xxh64(std::as_bytes(std::span(bytes)), seed).value;
      sums.values += xxh64(std::as_bytes(std::span(values)), seed).value;
    }
  }
  EXPECT_EQ(sums, whole());
}

TEST_P(CodeHash, OfShardsAddsUp) {
  const QuantizedTensor x = codes();
  const auto& [how, shape] = GetParam();
  const int64_t rows = std::max<int64_t>(32, how.block_rows), cols = (31 + how.block_cols) / how.block_cols * how.block_cols;
  CodeSums by_rows, by_columns;
  for (int64_t r = 0; r < shape[0]; r += rows) {
    const int64_t end = std::min(r + rows, shape[0]);
    by_rows += code_sums(slice(x, r, end), {.rows = end - r, .columns = shape[1], .first_row = r});
  }
  for (int64_t c = 0; c < shape[1]; c += 2 * cols) {
    const int64_t end = std::min(c + 2 * cols, shape[1]);
    by_columns += code_sums(columns(x, c, end), {.rows = shape[0], .columns = shape[1], .first_col = c});
  }
  EXPECT_EQ(by_rows, whole());
  EXPECT_EQ(by_columns, whole());
}

TEST_P(CodeHash, SeesEveryByteAndItsPlace) {
  const QuantizedTensor x = codes();
  const CodeSums before = whole();
  const CodePlace place{.rows = x.shape[0], .columns = x.shape[1]};
  for (const Tensor& bytes : {x.codes, x.scales}) {
    for (const int64_t i : {int64_t{0}, bytes.elements() / 2, bytes.elements() - 1}) {
      test::flip_bit(bytes, i);
      EXPECT_NE(code_sums(x, place).codes, before.codes);
      test::flip_bit(bytes, i);
    }
  }
  if (x.shape[0] <= 32 && x.shape[1] <= 32) return;
  EXPECT_NE(code_sums(x, {.rows = x.shape[0], .columns = x.shape[1], .first_row = 1024}).codes, before.codes);
}

// Rows that are padding of a block do not count, whatever they hold as long as the scale is the same.
TEST_P(CodeHash, RowsOfPaddingDoNotCount) {
  const QuantizedTensor x = codes();
  const int64_t rows = x.shape[0] - 5, width = x.codes.dim(1);
  const CodePlace place{.rows = rows, .columns = x.shape[1]};
  const CodeSums before = code_sums(x, place);
  EXPECT_NE(before, whole());
  for (int64_t i = rows * width; i < x.shape[0] * width; ++i) test::set_value(x.codes, i, 0);
  EXPECT_EQ(code_sums(x, place), before);
}

// Hashes hold for any part of the stack as a shard, and also where a matrix ends inside 32 rows.
class CodeHashOfGroupedWeights : public test::BackendTest {
 protected:
  void expect_sums_by_matrix(const Quantization& how, int64_t matrices, int64_t matrix_rows, int64_t shard_rows) {
    const Shape shape{matrices * matrix_rows, 96};
    const QuantizedTensor x = empty_quantized(fast(), shape, how);
    fast().run(Quantize{.x = test::random_tensor(fast(), Dtype::bf16, shape, 3), .out = x});
    std::vector<CodeSums> sums(static_cast<size_t>(matrices));
    const auto place = [&](int64_t begin, int64_t end) {
      return CodePlace{.rows = end - begin, .columns = shape[1], .first_row = begin, .matrix_rows = matrix_rows};
    };
    for (int64_t r = 0; r < shape[0]; r += shard_rows) {
      const int64_t end = std::min(r + shard_rows, shape[0]);
      add_code_sums(slice(x, r, end), place(r, end), sums);
    }
    CodeSums whole;
    for (int64_t i = 0; i < matrices; ++i) {
      const int64_t begin = i * matrix_rows, end = begin + matrix_rows;
      EXPECT_EQ(code_sums(slice(x, begin, end), place(begin, end)), sums[static_cast<size_t>(i)]) << "matrix " << i;
      whole += sums[static_cast<size_t>(i)];
    }
    EXPECT_EQ(code_sums(x, place(0, shape[0])), whole);
    if (matrix_rows % 32 != 0) return;
    EXPECT_EQ(code_sums(x, {.rows = shape[0], .columns = shape[1]}), whole) << "as of one matrix";
  }
};

TEST_F(CodeHashOfGroupedWeights, AreThoseOfEachMatrix) {
  const Quantization tiles{Format::e4m3, 32, 32}, rows{Format::e2m1, 1, 32};
  expect_sums_by_matrix(tiles, 5, 64, 5 * 64);
  expect_sums_by_matrix(tiles, 5, 64, 64);
  expect_sums_by_matrix(tiles, 5, 64, 96);
  expect_sums_by_matrix(rows, 40, 512, 3 * 512 + 32);
  expect_sums_by_matrix(rows, 6, 80, 6 * 80);
  expect_sums_by_matrix(rows, 6, 80, 32);
  expect_sums_by_matrix(rows, 6, 80, 2 * 80);
  expect_sums_by_matrix(rows, 3, 7, 7);
}

TEST_F(CodeHashOfGroupedWeights, TellWhichMatrixDiffers) {
  const QuantizedTensor x = empty_quantized(fast(), {3 * 48, 64}, {Format::e2m1, 1, 32});
  fast().run(Quantize{.x = test::random_tensor(fast(), Dtype::bf16, x.shape, 3), .out = x});
  const auto sums = [&] {
    std::vector<CodeSums> out(3);
    add_code_sums(x, {.rows = x.shape[0], .columns = x.shape[1], .matrix_rows = 48}, out);
    return out;
  };
  const std::vector<CodeSums> before = sums();
  for (const int64_t row : {48, 64, 95}) {
    test::flip_bit(x.codes, row * x.codes.dim(1));
    EXPECT_EQ(sums()[0], before[0]);
    EXPECT_NE(sums()[1].codes, before[1].codes) << row;
    EXPECT_EQ(sums()[2], before[2]);
    test::flip_bit(x.codes, row * x.codes.dim(1));
  }
}

class CodeHashContract : public test::BackendTest {};

TEST_F(CodeHashContract, ShardsThatHaveNoWholeCellsAreRefused) {
  const QuantizedTensor x = empty_quantized(fast(), {64, 96}, {Format::e4m3});
  const auto problem = [&](const QuantizedTensor& shard, const CodePlace& place) {
    return std::string(test::error_of([&] { code_sums(shard, place); }).what());
  };
  EXPECT_EQ(problem(x, {.rows = 65, .columns = 96}), "code_sums: 65 rows of a shard that is [64, 96]");
  EXPECT_EQ(problem(x, {.rows = 64, .columns = 192, .first_col = 16}),
            "code_sums: a shard at 0, 16 begins inside a cell of e4m3 1x32 rceil");
  EXPECT_EQ(problem(empty_quantized(fast(), {96, 96}, {Format::e4m3, 32, 32}), {.rows = 96, .columns = 96, .matrix_rows = 48}),
            "code_sums: the blocks of e4m3 32x32 rceil do not divide a cell of 16 x 32");
}

INSTANTIATE_TEST_SUITE_P(, CodeHash,
                         ::testing::Values(Case{{Format::e4m3, 32, 32}, {96, 160}}, Case{{Format::e4m3}, {70, 96}},
                                           Case{{Format::e2m1}, {45, 64}}, Case{{Format::e5m2, 128, 128}, {256, 384}},
                                           Case{{Format::e4m3, 1, 128}, {70, 256}}, Case{{Format::e4m3, 128, 128}, {300, 576}},
                                           Case{{Format::e4m3, 1, 128}, {70, 200}}, Case{{Format::e4m3, 32, 32}, {70, 75}},
                                           Case{{Format::e2m1, 1, 24}, {45, 100}}, Case{{Format::e4m3, 32, 32}, {2048, 1024}}),
                         [](const auto& c) { return "case" + std::to_string(c.index); });

}  // namespace mantissa::code_hash_test
