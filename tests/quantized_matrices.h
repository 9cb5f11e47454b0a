// Matrices for tests of quantization: values of several distributions, random bit patterns, codes and values of a quantized tensor.
#pragma once

#include "mantissa/formats/swizzle.h"
#include "testing.h"

namespace mantissa::test {

constexpr Quantization rows_of(Format format, int64_t block, ScaleRule rule = ScaleRule::rceil) { return {format, 1, block, rule}; }
constexpr Quantization tiles_of(Format format, int64_t block, ScaleRule rule = ScaleRule::rceil) { return {format, block, block, rule}; }

inline Tensor dequantized(const QuantizedTensor& x, Dtype dtype = Dtype::f32) {
  const Tensor out = empty(x.device(), dtype, x.shape);
  x.device().run(Dequantize{.x = x, .out = out});
  return out;
}

// Codes, one a byte, row by row.
inline std::vector<uint8_t> codes_of(const QuantizedTensor& x) {
  const std::vector<uint8_t> bytes = bytes_of(x.codes);
  if (!is_four_bit(x.how.format)) return bytes;
  std::vector<uint8_t> out;
  for (const uint8_t byte : bytes) out.push_back(unpack_nibble(byte, 0)), out.push_back(unpack_nibble(byte, 1));
  return out;
}

// The scale code of each element, row by row.
inline std::vector<int> scales_of(const QuantizedTensor& x) {
  const std::vector<uint8_t> bytes = bytes_of(x.scales);
  const int64_t cols = x.shape[1], per_row = x.scales.dim(1);
  std::vector<int> out;
  for (int64_t i = 0; i < x.shape[0] * cols; ++i)
    out.push_back(bytes[static_cast<size_t>(i / cols / x.how.block_rows * per_row + i % cols / x.how.block_cols)]);
  return out;
}

template <class T>
std::vector<T> transposed(const std::vector<T>& matrix, int64_t cols) {
  const int64_t rows = static_cast<int64_t>(matrix.size()) / cols;
  std::vector<T> out;
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < rows; ++r) out.push_back(matrix[static_cast<size_t>(r * cols + c)]);
  return out;
}

struct Distribution {
  const char* name;
  double (*draw)(int64_t row, uint64_t index);
};

inline double normal_draw(uint32_t what, uint64_t index) { return static_cast<double>(random_normal({.seed = 21}, what, index)); }
inline int integer_draw(uint32_t what, int64_t index, int count) {
  return static_cast<int>(random_words({.seed = 21}, what, static_cast<uint64_t>(index))[0] % static_cast<uint32_t>(count));
}

inline const std::vector<Distribution>& distributions() {
  static const std::vector<Distribution> all = {
      {"normal", [](int64_t, uint64_t i) { return normal_draw(0, i); }},
      {"student_t3",
       [](int64_t, uint64_t i) {
         const double a = normal_draw(1, i), b = normal_draw(2, i), c = normal_draw(3, i);
         return normal_draw(0, i) / std::sqrt((a * a + b * b + c * c) / 3);
       }},
      {"log_normal", [](int64_t, uint64_t i) { return std::copysign(std::exp(2 * normal_draw(0, i)), normal_draw(1, i)); }},
      {"spread_rows", [](int64_t row, uint64_t i) { return std::ldexp(normal_draw(0, i), integer_draw(4, row, 21) - 10); }},
      {"zero_rows", [](int64_t row, uint64_t i) { return normal_draw(0, i) * (row % 3 == 0 ? 0.0 : 1.0); }},
      {"tiny", [](int64_t row, uint64_t i) { return std::ldexp(normal_draw(0, i), -110 - integer_draw(5, row, 20)); }},
      {"huge", [](int64_t row, uint64_t i) { return std::ldexp(normal_draw(0, i) / 4, 127 - integer_draw(6, row, 6)); }},
  };
  return all;
}

inline Tensor drawn_matrix(Backend& device, const Distribution& distribution, int64_t rows, int64_t cols) {
  std::vector<double> out;
  for (int64_t i = 0; i < rows * cols; ++i) out.push_back(distribution.draw(i / cols, static_cast<uint64_t>(i)));
  return tensor_of(device, Dtype::bf16, {rows, cols}, out);
}

// Random bit patterns: any sign and fraction, with an exponent field out of `fields` consecutive ones. These are drawn anew for each patch,
// from `first` to `last`; one element in `one_nonfinite_in`, if that is not 0, is NaN or Inf instead.
struct Patterns {
  const char* name;
  int first = 0, last = 255, fields = 1;
  int64_t patch_rows = 1 << 20, patch_cols = 1 << 20;
  int one_nonfinite_in = 0;
};

inline const std::vector<Patterns>& patterns() {
  static const std::vector<Patterns> all = {
      {.name = "any", .last = 0, .fields = 256},
      {.name = "finite", .last = 0, .fields = 255},
      {.name = "subnormal_and_tiny", .last = 0, .fields = 24},
      {.name = "regular", .first = 112, .last = 112, .fields = 20},
      {.name = "by_tile", .last = 246, .fields = 8, .patch_rows = 32, .patch_cols = 32, .one_nonfinite_in = 3000},
      {.name = "by_row", .last = 246, .fields = 8, .patch_rows = 1, .one_nonfinite_in = 1000},
      {.name = "by_column", .last = 246, .fields = 8, .patch_cols = 1, .one_nonfinite_in = 1000},
      {.name = "few_nonfinite", .first = 112, .last = 112, .fields = 20, .one_nonfinite_in = 500},
  };
  return all;
}

// fp32 bits; those of bf16 have a fraction of 7 bits.
inline uint32_t pattern(const Patterns& p, int64_t row, int64_t col, Dtype dtype) {
  const auto patch = random_words({.seed = 22}, 1, static_cast<uint64_t>(row / p.patch_rows * 10007 + col / p.patch_cols));
  const auto words = random_words({.seed = 22}, 2, static_cast<uint64_t>(row << 20 | col));
  const uint32_t fields = static_cast<uint32_t>(p.fields), choices = static_cast<uint32_t>(p.last - p.first + 1);
  uint32_t field = static_cast<uint32_t>(p.first) + patch[0] % choices + words[0] % fields;
  uint32_t fraction = words[1] >> 9;
  if (p.one_nonfinite_in > 0 && words[2] % static_cast<uint32_t>(p.one_nonfinite_in) == 0) {
    field = 255;
    if (words[3] % 2 == 0) fraction = 0;
  }
  return ((words[3] & 0x80000000U) | field << 23 | fraction) & (dtype == Dtype::bf16 ? 0xFFFF0000U : 0xFFFFFFFFU);
}

inline Tensor pattern_matrix(Backend& device, const Patterns& p, Dtype dtype, int64_t rows, int64_t cols) {
  std::vector<uint32_t> wide;
  for (int64_t i = 0; i < rows * cols; ++i) wide.push_back(pattern(p, i / cols, i % cols, dtype));
  if (dtype == Dtype::f32) return from_host(device, dtype, {rows, cols}, wide.data());
  std::vector<uint16_t> narrow;
  for (const uint32_t bits : wide) narrow.push_back(static_cast<uint16_t>(bits >> 16));
  return from_host(device, dtype, {rows, cols}, narrow.data());
}

}  // namespace mantissa::test
