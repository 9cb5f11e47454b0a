// Quantizes row blocks of bf16 rows in lanes: for quantize.cpp, and for requantization, from the values of codes. Blocks that code_lanes.h
// does not cover (non-finite, or with tiny scales) go through the scalar codecs, so every bit is the reference's. Rows are read one after
// another, twice: for the largest magnitudes, and to encode with what they give. Walking down columns instead throws lines out of a cache
// of few ways where rows are a power of two apart.
#pragma once

#include <algorithm>
#include <cstring>

#include "backend/cpu/fast/codes/code_lanes.h"
#include "backend/cpu/quantized_rows.h"
#include "mantissa/base/integers.h"

namespace mantissa::lanes {

// Rows [first, end) of `out`, whole blocks of them. x holds `given` of these rows; those beyond are zeros.
struct RowBlock {
  const bf16* x;
  int64_t given, first, end;
  const QuantizedTensor& out;

  int64_t cols() const { return out.shape[1]; }
  uint32_t bits(int64_t row, int64_t col) const { return row - first < given ? fp32_bits(x[(row - first) * cols() + col]) : 0U; }
};

// Findings of the lanes about blocks: true if they cover all of them, and if one held NaN or Inf.
struct Found {
  bool covered = true, nonfinite = false;
};

// Quantizes the blocks whose first rows are in [first, end), one by one.
template <class E>
[[gnu::noinline]] void quantize_blocks(const RowBlock& row_block, int64_t first, int64_t end) {
  const Quantization& how = row_block.out.how;
  const auto bits = [&row_block](int64_t r, int64_t c) { return row_block.bits(r, c); };
  for (int64_t r = first; r < end; r += how.block_rows) {
    uint8_t* scale = row_block.out.scales.device_data<uint8_t>() + r / how.block_rows * row_block.out.scales.dim(1);
    for (int64_t c = 0; c < row_block.cols(); c += how.block_cols) {
      *scale++ = quantize_block<E>({r, how.block_rows, c, how.block_cols}, how, Codes<E>(row_block.out), bits);
    }
  }
}

// Turns the largest magnitudes of blocks into shifts, in place, and writes their scales.
template <class E>
[[gnu::always_inline]] inline Found shifts_of_blocks(int16_t* blocks, int64_t count, const Quantization& how, uint8_t* scales) {
  Words tiny_or_infinite{}, infinite{};
  std::fill(blocks + count, blocks + round_up(count, kLanes), int16_t{0});
  for (int64_t i = 0; i < count; i += kLanes) {
    const Words amax = load(blocks + i), scale = scale_of<E>(amax, how.rule, how.range);
    tiny_or_infinite |= irregular<E>(amax, scale);
    infinite |= amax >= 0x7F80;
    store(blocks + i, amax == 0 ? Words{} : exponent_shift(scale));
    uint8_t bytes[kLanes];
    store_bytes(bytes, scale);
    copy_bytes(scales + i, bytes, count - i);
  }
  return {.covered = !any(tiny_or_infinite), .nonfinite = any(infinite)};
}

// Like shifts_of_blocks(), but where a block has `each` spans: turns the largest magnitude of each span into its shift.
template <class E>
[[gnu::always_inline]] inline Found shifts_of_spans(int16_t* spans, int64_t blocks, int64_t each, const Quantization& how,
                                                    uint8_t* scales) {
  for (int64_t b = 0; each > 1 && b < blocks; ++b) spans[b] = *std::max_element(spans + b * each, spans + (b + 1) * each);
  const Found found = shifts_of_blocks<E>(spans, blocks, how, scales);
  for (int64_t b = blocks - 1; each > 1 && b >= 0; --b) std::fill_n(spans + b * each, each, int16_t{spans[b]});
  return found;
}

[[gnu::always_inline]] inline void amax_of_columns(const bf16* x, int64_t cols, int16_t* columns) {
  for (int64_t c = 0; c < cols; c += kLanes) store(columns + c, max(load(columns + c), magnitude(load(x + c))));
}

// Finds the largest magnitude of each span of a row of bf16, or of magnitudes. These are spans, not blocks, of a length known to the
// compiler: in front of an inner loop over a block it would load the constants anew.
template <int64_t kSpan, class T>
[[gnu::always_inline]] inline void amax_of_spans(const T* x, int64_t cols, int16_t* spans) {
  for (int64_t c = 0; c < cols; c += kSpan) {
    Words amax = magnitude(load(x + c));
    if constexpr (kSpan > kLanes) amax = max(amax, magnitude(load(x + c + kLanes)));
    *spans++ = static_cast<int16_t>(largest(amax));
  }
}

template <class E>
[[gnu::always_inline]] inline void encode_pair(const bf16* x, Words low_shift, Words high_shift, uint8_t* codes) {
  const Words low = load(x), high = load(x + kLanes);
  if constexpr (E::mantissa_bits > 1) {  // with many binades few elements lie below the normal ones
    Words small{};
    const Words low_codes = encode_normal<E>(low, low_shift, small), high_codes = encode_normal<E>(high, high_shift, small);
    if (!any(small)) [[likely]]
      return store_codes<E>(codes, low_codes, high_codes);
  }
  store_codes<E>(codes, encode<E>(low, low_shift), encode<E>(high, high_shift));
}

// Encodes one row, with a shift for each column or for each span.
template <class E>
[[gnu::always_inline]] inline void encode_columns(const bf16* x, int64_t cols, const int16_t* shifts, uint8_t* codes) {
  for (int64_t c = 0; c < cols; c += kPair)
    encode_pair<E>(x + c, load(shifts + c), load(shifts + c + kLanes), codes + c / E::codes_per_byte);
}
template <class E, int64_t kSpan>
[[gnu::always_inline]] inline void encode_spans(const bf16* x, int64_t cols, const int16_t* shifts, uint8_t* codes) {
  for (int64_t c = 0; c < cols; c += kSpan) {
    const Words shift = broadcast(shifts[c / kSpan]);
    if constexpr (kSpan == kPair) encode_pair<E>(x + c, shift, shift, codes + c / E::codes_per_byte);
    if constexpr (kSpan == kLanes) store_codes<E>(codes + c / E::codes_per_byte, encode<E>(load(x + c), shift));
  }
}

// Quantizes a row block of b x 1 blocks or tiles. `words` holds one for each column. Returns true if a value was not finite.
template <class E>
[[gnu::always_inline]] inline bool quantize_columns(const RowBlock& row_block, int16_t* words) {
  const Quantization how = row_block.out.how;
  const int64_t cols = row_block.cols(), row_bytes = cols / E::codes_per_byte;
  uint8_t* codes = row_block.out.codes.device_data<uint8_t>() + row_block.first * row_bytes;
  uint8_t* scales = row_block.out.scales.device_data<uint8_t>() + row_block.first / how.block_rows * row_block.out.scales.dim(1);
  std::fill(words, words + cols, int16_t{0});
  for (int64_t r = 0; r < row_block.given; ++r) amax_of_columns(row_block.x + r * cols, cols, words);
  if (how.tiles()) amax_of_spans<kPair>(words, cols, words);  // writes behind what it still reads
  const Found found = how.tiles() ? shifts_of_spans<E>(words, cols / how.block_cols, how.block_cols / kPair, how, scales)
                                  : shifts_of_blocks<E>(words, cols, how, scales);
  if (!found.covered) {
    quantize_blocks<E>(row_block, row_block.first, row_block.end);
    return found.nonfinite;
  }
  for (int64_t r = 0; r < row_block.given; ++r, codes += row_bytes) {
    const bf16* x = row_block.x + r * cols;
    how.tiles() ? encode_spans<E, kPair>(x, cols, words, codes) : encode_columns<E>(x, cols, words, codes);
  }
  std::memset(codes, 0, static_cast<size_t>((row_block.end - row_block.first - row_block.given) * row_bytes));
  return found.nonfinite;
}

// Quantizes a row block of 1 x b blocks, b a multiple of the span.
template <class E, int64_t kSpan>
[[gnu::always_inline]] inline bool quantize_rows(const RowBlock& row_block, int16_t* words) {
  const Quantization how = row_block.out.how;
  const int64_t cols = row_block.cols(), row_bytes = cols / E::codes_per_byte, blocks = cols / how.block_cols;
  uint8_t *codes = row_block.out.codes.device_data<uint8_t>() + row_block.first * row_bytes,
          *scales = row_block.out.scales.device_data<uint8_t>() + row_block.first * blocks;
  bool nonfinite = false;
  for (int64_t r = 0; r < row_block.given; ++r, codes += row_bytes, scales += blocks) {
    const bf16* x = row_block.x + r * cols;
    amax_of_spans<kSpan>(x, cols, words);
    const Found found = shifts_of_spans<E>(words, blocks, how.block_cols / kSpan, how, scales);
    nonfinite |= found.nonfinite;
    found.covered ? encode_spans<E, kSpan>(x, cols, words, codes)
                  : quantize_blocks<E>(row_block, row_block.first + r, row_block.first + r + 1);
  }
  std::memset(codes, 0, static_cast<size_t>((row_block.end - row_block.first - row_block.given) * row_bytes));
  std::memset(scales, how.range.least, static_cast<size_t>((row_block.end - row_block.first - row_block.given) * blocks));
  return nonfinite;
}

}  // namespace mantissa::lanes
