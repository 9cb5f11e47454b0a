// Access to the elements and codes of a matrix one by one, which the plain quantizing kernels share.
#pragma once

#include <algorithm>

#include "mantissa/formats/block_scale.h"
#include "mantissa/formats/swizzle.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

inline uint32_t fp32_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
inline uint32_t fp32_bits(bf16 value) { return static_cast<uint32_t>(value.bits) << 16; }
inline float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Codes of a matrix with `cols` columns. Codes that share a byte are set in ascending order of columns: an even column clears its
// neighbor.
template <class E>
class Codes {
 public:
  Codes(const QuantizedTensor& tensor) : data_(tensor.codes.device_data<uint8_t>()), cols_(tensor.shape[1]) {}

  uint8_t get(int64_t row, int64_t col) const {
    const uint8_t byte = data_[(row * cols_ + col) / E::codes_per_byte];
    return E::codes_per_byte == 1 ? byte : unpack_nibble(byte, col);
  }
  void set(int64_t row, int64_t col, uint8_t code) const {
    uint8_t& byte = data_[(row * cols_ + col) / E::codes_per_byte];
    const bool second = E::codes_per_byte > 1 && col % 2 != 0;
    byte = second ? pack_nibbles(byte, code) : code;
  }

 private:
  uint8_t* data_;
  int64_t cols_;
};

struct Block {
  int64_t row, rows, col, cols;
};

// Returns the block that begins here. The last ones of a matrix may be smaller than its format says.
inline Block block_at(const QuantizedTensor& tensor, int64_t row, int64_t col) {
  return {row, std::min(tensor.how.block_rows, tensor.shape[0] - row), col, std::min(tensor.how.block_cols, tensor.shape[1] - col)};
}

template <class Body>
void for_each_element(const Block& block, const Body& body) {
  for (int64_t r = block.row; r < block.row + block.rows; ++r) {
    for (int64_t c = block.col; c < block.col + block.cols; ++c) body(r, c);
  }
}

// Writes the codes of one block and returns its scale; `bits(row, col)` gives the fp32 bits of an element.
template <class E, class Bits>
uint8_t quantize_block(const Block& block, const Quantization& how, const Codes<E>& codes, const Bits& bits) {
  uint32_t key = 0;
  for_each_element(block, [&](int64_t r, int64_t c) { key = std::max(key, amax_key(bits(r, c), how.rule)); });
  const uint32_t amax = amax_of_key(key);
  uint8_t scale = block_scale<E>(amax, how.code_rule(), how.range);
  if constexpr (searches_scale<E>(ScaleRule::mse)) {
    if (how.rule == ScaleRule::mse) {
      if constexpr (E::two_levels) {
        scale = E::searched_scale(amax, how.tensor_exponent, [&](uint8_t at) {
          int64_t sum = 0;
          for_each_element(block, [&](int64_t r, int64_t c) { sum += E::squared_error(bits(r, c), amax, at, how.tensor_exponent); });
          return sum;
        });
      } else {
        ScaleErrors errors;
        for_each_element(block, [&](int64_t r, int64_t c) { errors.add(bits(r, c), amax); });
        scale = searched_scale<E>(amax, errors, how.range);
      }
    }
  }
  for_each_element(block, [&](int64_t r, int64_t c) { codes.set(r, c, encode_in_block<E>(bits(r, c), scale, how.code_rule())); });
  return scale;
}

}  // namespace mantissa
