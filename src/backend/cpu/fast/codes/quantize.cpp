// Quantizes row blocks of bf16, and decodes codes, in lanes. Where code_lanes.h does not cover a block,
// because it is not finite or its scale is tiny, all blocks side by side with it go through the scalar codecs, so every bit is the
// reference's.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "backend/cpu/fast/codes/code_lanes.h"
#include "backend/cpu/fast/codes/nvfp4_lanes.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/quantized_rows.h"
#include "base/parallel.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/with_element.h"

namespace mantissa::lanes {
namespace {

// A row block is all blocks side by side that share their rows (rowwise: so many rows as a block has elements). It is read twice, row by
// row: the first pass finds the largest magnitudes, the second encodes with the scales that follow from them. A pass down the columns would
// evict its own cache lines where rows are a power of two apart.

// Rows [first, end) of `out`, a whole row block. x holds the first `given` of these rows; those beyond are zeros.
struct RowBlock {
  const bf16* x;
  int64_t given, first, end;
  const QuantizedTensor& out;

  int64_t cols() const { return out.shape[1]; }
};

// Findings of the lanes about some blocks. covered: they can encode all of them; nonfinite: one held NaN or Inf.
struct Found {
  bool covered = true, nonfinite = false;
};

// Quantizes the blocks whose first rows are in [first, end), one by one, by the scalar codec.
template <class E>
[[gnu::noinline]] void quantize_blocks(const RowBlock& row_block, int64_t first, int64_t end) {
  const Quantization& how = row_block.out.how;
  const auto bits = [&b = row_block](int64_t r, int64_t c) {
    return r - b.first < b.given ? fp32_bits(b.x[(r - b.first) * b.cols() + c]) : 0U;
  };
  for (int64_t r = first; r < end; r += how.block_rows) {
    uint8_t* scale = row_block.out.scales.device_data<uint8_t>() + r / how.block_rows * row_block.out.scales.dim(1);
    for (int64_t c = 0; c < row_block.cols(); c += how.block_cols)
      *scale++ = quantize_block<E>(block_at(row_block.out, r, c), how, Codes<E>(row_block.out), bits);
  }
}

// Computes the scales of blocks. A block is `each` consecutive ones of the `count` spans; the last may have fewer. On entry `spans` has
// the largest magnitude of each span; on return it has the exponent shift by which the span's elements are encoded, which is the same for
// all spans of a block.
template <class E>
[[gnu::always_inline]] inline Found shifts_of_spans(int16_t* spans, int64_t count, int64_t each, const Quantization& how, uint8_t* scales) {
  const int64_t blocks = ceil_div(count, each);
  for (int64_t b = 0; each > 1 && b < blocks; ++b) spans[b] = *std::max_element(spans + b * each, spans + std::min((b + 1) * each, count));
  Words tiny_or_infinite{}, infinite{};
  std::fill(spans + blocks, spans + round_up(blocks, kLanes), int16_t{0});
  for (int64_t i = 0; i < blocks; i += kLanes) {
    const Words amax = load(spans + i), scale = scale_of<E>(amax, how.rule, how.range);
    tiny_or_infinite |= irregular<E>(amax, scale);
    infinite |= amax >= 0x7F80;
    store(spans + i, amax == 0 ? Words{} : exponent_shift(scale));
    uint8_t bytes[kLanes];
    store_bytes(bytes, scale);
    copy_bytes(scales + i, bytes, blocks - i);
  }
  for (int64_t b = blocks - 1; each > 1 && b >= 0; --b)
    std::fill(spans + b * each, spans + std::min((b + 1) * each, count), int16_t{spans[b]});
  return {.covered = !any(tiny_or_infinite), .nonfinite = any(infinite)};
}

// Finds the largest magnitude of each span of a row of bf16 or of magnitudes. A span is a part of a block with a
// length known when this is compiled. Blocks have a length known at run time, and a loop for each would load its constants anew.
template <int64_t kSpan, class T>
[[gnu::always_inline]] inline void amax_of_spans(const T* x, int64_t cols, int16_t* spans) {
  for (int64_t c = 0; c < cols; c += kSpan) {
    Words amax = magnitude(load(x + c));
    if constexpr (kSpan > kLanes) amax = max(amax, magnitude(load(x + c + kLanes)));
    *spans++ = static_cast<int16_t>(largest(amax));
  }
}

// Replaces the amax of each E2M1 block of a row by one for which scale_of() gives the scale of mse. `spans` has the amax of each span. Most
// blocks need no search: none of n elements saves more than 1/16 at half of floor's scale, and there amax = 4 + 4 fraction adds
// 1 + 8 fraction or more; nothing is saved at twice that scale up to kNeverAbove. Returns false if a block is not covered.
template <int64_t kSpan>
[[gnu::always_inline]] inline bool search_spans(const bf16* x, int64_t cols, int64_t each, int16_t* spans) {
  const int64_t count = cols / kSpan;
  for (int64_t b = 0; b < count; b += each) {
    const int64_t end = std::min(b + each, count), n = (end - b) * kSpan;
    const int16_t amax = each == 1 ? spans[b] : *std::max_element(spans + b, spans + end);
    if (amax == 0 || amax >= 0x7F80) continue;
    if (amax < kFirstSearchedAmax || n > kMostSearched) return false;
    const int fraction = amax & 0x7F;
    const bool low = fraction <= n - 17, high = fraction > kNeverAbove;
    if (!low && !high) continue;
    const auto below = [](Floats t) __attribute__((always_inline)) { return errors_below(t); };
    const auto above = [](Floats t) __attribute__((always_inline)) { return errors_above(t); };
    const float error_below = low ? sum_of_errors(x + b * kSpan, n, amax, below) : 1.0F;
    const float error_above = high ? sum_of_errors(x + b * kSpan, n, amax, above) : 0.0F;
    const int exponent = amax & 0x7F80;
    const int best = error_below <= 0.0F && error_below <= error_above ? exponent - 0x80 : error_above < 0.0F ? exponent | 0x7F : exponent;
    std::fill(spans + b, spans + end, static_cast<int16_t>(best));
  }
  return true;
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

// Encodes one row, with a shift for each span.
template <class E, int64_t kSpan>
[[gnu::always_inline]] inline void encode_spans(const bf16* x, int64_t cols, const int16_t* shifts, uint8_t* codes) {
  for (int64_t c = 0; c < cols; c += kSpan) {
    const Words shift = broadcast(shifts[c / kSpan]);
    if constexpr (kSpan == kPair) encode_pair<E>(x + c, shift, shift, codes + c / E::codes_per_byte);
    if constexpr (kSpan == kLanes) store_codes<E>(codes + c / E::codes_per_byte, encode<E>(load(x + c), shift));
  }
}

// Quantizes a row block of b x 1 blocks or tiles. `words` has room for a word for each column. Returns true if a value was not finite.
template <class E>
[[gnu::always_inline]] inline bool quantize_columns(const RowBlock& row_block, int16_t* words) {
  const Quantization how = row_block.out.how;
  const int64_t cols = row_block.cols(), row_bytes = cols / E::codes_per_byte;
  uint8_t* codes = row_block.out.codes.device_data<uint8_t>() + row_block.first * row_bytes;
  uint8_t* scales = row_block.out.scales.device_data<uint8_t>() + row_block.first / how.block_rows * row_block.out.scales.dim(1);
  std::fill(words, words + cols, int16_t{0});
  for (const bf16* x = row_block.x; x < row_block.x + row_block.given * cols; x += cols) {
    for (int64_t c = 0; c < cols; c += kLanes) store(words + c, max(load(words + c), magnitude(load(x + c))));
  }
  if (how.tiles()) amax_of_spans<kPair>(words, cols, words);  // in place: span k is written at k, and reading has gone past that
  const Found found = how.tiles() ? shifts_of_spans<E>(words, cols / kPair, how.block_cols / kPair, how, scales)
                                  : shifts_of_spans<E>(words, cols, 1, how, scales);
  if (!found.covered || searches_scale<E>(how.rule)) {
    quantize_blocks<E>(row_block, row_block.first, row_block.end);
    return found.nonfinite;
  }
  for (int64_t r = 0; r < row_block.given; ++r, codes += row_bytes) {
    const bf16* x = row_block.x + r * cols;
    if (how.tiles()) {
      encode_spans<E, kPair>(x, cols, words, codes);
      continue;
    }
    for (int64_t c = 0; c < cols; c += kPair)
      encode_pair<E>(x + c, load(words + c), load(words + c + kLanes), codes + c / E::codes_per_byte);
  }
  std::memset(codes, 0, static_cast<size_t>((row_block.end - row_block.first - row_block.given) * row_bytes));
  return found.nonfinite;
}

// Quantizes a row block of 1 x b blocks, b and the columns multiples of the span.
template <class E, int64_t kSpan>
[[gnu::always_inline]] inline bool quantize_rows(const RowBlock& row_block, int16_t* words) {
  const Quantization how = row_block.out.how;
  const int64_t cols = row_block.cols(), row_bytes = cols / E::codes_per_byte, blocks = row_block.out.scales.dim(1);
  uint8_t *codes = row_block.out.codes.device_data<uint8_t>() + row_block.first * row_bytes,
          *scales = row_block.out.scales.device_data<uint8_t>() + row_block.first * blocks;
  bool nonfinite = false;
  for (int64_t r = 0; r < row_block.given; ++r, codes += row_bytes, scales += blocks) {
    const bf16* x = row_block.x + r * cols;
    amax_of_spans<kSpan>(x, cols, words);
    bool searched = true;
    if constexpr (searches_scale<E>(ScaleRule::mse)) {
      if (how.rule == ScaleRule::mse) searched = search_spans<kSpan>(x, cols, how.block_cols / kSpan, words);
    }
    const Found found = shifts_of_spans<E>(words, cols / kSpan, how.block_cols / kSpan, how, scales);
    nonfinite |= found.nonfinite;
    if (found.covered && searched) {
      encode_spans<E, kSpan>(x, cols, words, codes);
    } else {
      quantize_blocks<E>(row_block, row_block.first + r, row_block.first + r + 1);
    }
  }
  std::memset(codes, 0, static_cast<size_t>((row_block.end - row_block.first - row_block.given) * row_bytes));
  std::memset(scales, how.range.least, static_cast<size_t>((row_block.end - row_block.first - row_block.given) * blocks));
  return nonfinite;
}

template <class E>
[[gnu::always_inline]] inline bool quantize(const RowBlock& row_block, int16_t* words) {
  return row_block.out.how.rowwise() ? quantize_rows<E, kPair>(row_block, words) : quantize_columns<E>(row_block, words);
}

}  // namespace
}  // namespace mantissa::lanes

namespace mantissa {
namespace {

using lanes::kLanes, lanes::kPair, lanes::Words;

// Room for a word for each column.
int16_t* words_of_columns(int64_t cols) {
  thread_local std::vector<int16_t> words;
  if (words.size() < static_cast<size_t>(cols)) words.resize(static_cast<size_t>(cols));
  return words.data();
}

bool quantize_row_block(const lanes::RowBlock& row_block, int16_t* words) {
  if (row_block.out.how.block() % kPair != 0 || row_block.cols() % kPair != 0)
    return cloned<lanes::quantize_rows<E2M1, kLanes>>(row_block, words);
  return with_element(row_block.out.how.format, [&]<class E>() { return cloned<lanes::quantize<E>>(row_block, words); });
}

// Where columns end within a span, the lanes take copies of some rows, with zeros up to the end of the span. These change no scale and no
// code of a block that is finite.

// Copies rows of `count` of the `from` elements that they have, to rows of `to` elements.
template <class T>
void copy_rows(const T* source, int64_t from, T* target, int64_t to, int64_t count, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    std::copy_n(source + r * from, count, target + r * to);
    std::fill(target + r * to + count, target + (r + 1) * to, T{});
  }
}
void copy_rows(const Tensor& source, int64_t first, const Tensor& target, int64_t first_there, int64_t rows) {
  const int64_t from = source.dim(1), to = target.dim(1);
  copy_rows(source.device_data<uint8_t>() + first * from, from, target.device_data<uint8_t>() + first_there * to, to, std::min(from, to),
            rows);
}

// Returns room for rows of so many columns and what fills their last span, one for each kUse of a thread.
template <int kUse>
QuantizedTensor padded_room(Backend& device, int64_t rows, int64_t cols, const Quantization& how) {
  thread_local std::vector<std::byte> room;
  const Shape shape{rows, round_up(cols, kPair)}, codes = codes_shape(shape, how), scales = scales_shape(shape, how);
  const auto bytes = static_cast<size_t>(codes.elements() + scales.elements());
  if (room.size() < bytes) room.resize(bytes);
  const auto view = [&](std::byte* from, const Shape& of) {
    return Tensor(device, std::shared_ptr<std::byte>(std::shared_ptr<void>(), from), true, Dtype::u8, of);
  };
  return {.codes = view(room.data(), codes), .scales = view(room.data() + codes.elements(), scales), .shape = shape, .how = how};
}

// A block that is not finite decides by its own elements alone.
bool quantize_ragged(Backend& device, const lanes::RowBlock& row_block, int16_t* words) {
  const QuantizedTensor& out = row_block.out;
  const int64_t cols = row_block.cols(), wide = round_up(cols, kPair), rows = row_block.end - row_block.first;
  thread_local std::vector<bf16> x;
  if (x.size() < static_cast<size_t>(row_block.given * wide)) x.resize(static_cast<size_t>(row_block.given * wide));
  copy_rows(row_block.x, cols, x.data(), wide, cols, row_block.given);
  const QuantizedTensor padded = padded_room<0>(device, rows, cols, out.how);
  if (quantize_row_block({x.data(), row_block.given, 0, rows, padded}, words)) {
    with_element(out.how.format, [&]<class E>() { lanes::quantize_blocks<E>(row_block, row_block.first, row_block.end); });
    return true;
  }
  copy_rows(padded.codes, 0, out.codes, row_block.first, rows);
  copy_rows(padded.scales, 0, out.scales, row_block.first / out.how.block_rows, padded.scales.dim(0));
  return false;
}

}  // namespace

void CpuBackend::execute(const Quantize& k) {
  const Quantization& how = k.out.how;
  if (how.format == Format::nvfp4) {
    if (k.x.dtype() != Dtype::bf16 || k.x.dim(1) % kLanes != 0) return CpuReference::execute(k);
    std::atomic<bool> nonfinite = false;
    const lanes::Nvfp4Tables& tables = lanes::Nvfp4Tables::get();
    parallel_for(k.out.shape[0], rows_per_piece(k.x.dim(1)), [&](int64_t begin, int64_t end) {
      if (cloned<lanes::quantize_nvfp4>(k, tables, begin, end)) nonfinite = true;
    });
    if (nonfinite && k.nonfinite.defined()) *k.nonfinite.device_data<int32_t>() = 1;
    return;
  }
  const int64_t height = how.block(), rows = k.out.shape[0], cols = k.x.dim(1);
  // The lanes take blocks whose length is a multiple of 32, and rowwise E2M1 blocks of a multiple of 16, which only fake quantization has,
  // if the columns are such a multiple, too. All else goes to the reference.
  const bool groups = how.format == Format::e2m1 && how.rowwise() && height % kLanes == 0 && cols % kLanes == 0,
             ragged = cols % kPair != 0 && !groups;
  const bool transposes = k.second.defined() && k.second.how.rowwise();
  if (transposes || k.x.dtype() != Dtype::bf16 || !(height % kPair == 0 || groups)) return CpuReference::execute(k);
  std::atomic<bool> nonfinite = false;
  parallel_for(ceil_div(rows, height), std::max<int64_t>(1, rows_per_piece(cols) / height), [&](int64_t begin, int64_t end) {
    int16_t* words = words_of_columns(round_up(cols, kPair));
    const auto quantize = [&](const lanes::RowBlock& row_block) {
      if (ragged ? quantize_ragged(*this, row_block, words) : quantize_row_block(row_block, words)) nonfinite = true;
    };
    for (int64_t i = begin; i < end; ++i) {  // block by block: what the first pass read is still in cache for the second
      const int64_t first = i * height, last = std::min(rows, first + height),
                    given = std::clamp<int64_t>(k.x.dim(0) - first, 0, last - first);
      const bf16* x = k.x.device_data<bf16>() + std::min(first, k.x.dim(0)) * cols;
      quantize({x, given, first, last, k.out});
      if (k.second.defined()) quantize({x, given, first, last, k.second});
    }
  });
  if (nonfinite && k.nonfinite.defined()) *k.nonfinite.device_data<int32_t>() = 1;
}

namespace {

// Reads codes and scales of columns [first, first + width) of a matrix as bf16 bits, row by row. A span of kSpan columns lies within one
// block, unless kColumnwise, where each column has its own scale.
template <class E, int64_t kSpan, bool kColumnwise>
class Reader {
 public:
  Reader(const QuantizedTensor& x, int64_t first, int64_t width)
      : how_(x.how),
        codes_(x.codes.device_data<uint8_t>()),
        scales_(x.scales.device_data<uint8_t>()),
        cols_(x.shape[1]),
        across_(x.scales.dim(1)),
        first_(first),
        width_(width),
        row_bits_(std::countr_zero(static_cast<uint64_t>(how_.block_rows))),
        col_bits_(std::countr_zero(static_cast<uint64_t>(how_.block_cols))),
        all_(x) {}

  // Calls take(i, bits) for each group of lanes of a row, and scalar(i) for those that the lanes do not cover; i counts from the first
  // column. `words` holds one for each column.
  template <class Take, class Scalar>
  [[gnu::always_inline]] void decode_row(int64_t row, int16_t* words, const Take& take, const Scalar& scalar) const {
    const bool regular = shifts(row, words);
    for (int64_t c = 0; c < width_; c += kSpan) {
      lanes::Groups<kSpan> bits;
      if (regular && decode_span(row, c, words, bits.data())) [[likely]] {
        take(c, bits[0]);
        if constexpr (kSpan > kLanes) take(c + kLanes, bits[1]);
        continue;
      }
      for (int64_t i = c; i < c + kSpan; i += kLanes) decode_group(row, i, bits[0]) ? take(i, bits[0]) : scalar(i);
    }
  }

  uint32_t fp32(int64_t row, int64_t i) const {
    return decode_in_block<E>(all_.get(row, first_ + i), scale_at(row, first_ + i), how_.rule);
  }

  // Returns true if a non-zero element of the group has an extreme scale.
  bool extreme(int64_t row, int64_t i) const {
    for (int64_t c = first_ + i; c < first_ + i + kLanes; ++c) {
      if ((all_.get(row, c) & E::magnitude_mask) != 0 && extreme_scale<E>(scale_at(row, c))) return true;
    }
    return false;
  }

 private:
  static constexpr int16_t kFirst = E::bias + E::mantissa_bits, kLast = 254 - E::emax;  // scales with which all elements are normal bf16
  static constexpr bool kTable = E::codes_per_byte > 1 && !kColumnwise;  // the elements of a span are those of one small table

  uint8_t scale_at(int64_t row, int64_t col) const { return scales_[(row >> row_bits_) * across_ + (col >> col_bits_)]; }
  [[gnu::always_inline]] const uint8_t* codes_at(int64_t row, int64_t i) const {
    return codes_ + static_cast<uint64_t>(row * cols_ + first_ + i) / E::codes_per_byte;
  }

  // Writes the shift of each column or span. Returns true if no scale is outside kFirst .. kLast.
  [[gnu::always_inline]] bool shifts(int64_t row, int16_t* words) const {
    const int64_t count = ceil_div(width_, int64_t{1} << col_bits_);
    const uint8_t* scales = scales_ + (row >> row_bits_) * across_ + (first_ >> col_bits_);
    Words outside{};
    for (int64_t i = 0; i < count; i += kLanes) {
      uint8_t bytes[kLanes];
      lanes::store_bytes(bytes, lanes::broadcast(kFirst));
      lanes::copy_bytes(bytes, scales + i, count - i);
      const Words scale = lanes::load_bytes(bytes);
      outside |= (scale < kFirst) | (scale > kLast);
      lanes::store(words + i, lanes::exponent_shift(scale));
    }
    const int64_t each = kColumnwise ? 1 : how_.block_cols / kSpan;
    const int64_t spans = width_ / kSpan;  // the last block may have fewer of them
    for (int64_t b = count - 1; each > 1 && b >= 0; --b)
      std::fill(words + b * each, words + std::min((b + 1) * each, spans), int16_t{words[b]});
    return !lanes::any(outside);
  }

  // bf16 bits of the groups of a span whose scales are within kFirst .. kLast; false if one needs decode_group().
  [[gnu::always_inline]] bool decode_span(int64_t row, int64_t i, const int16_t* shifts, Words* bits) const {
    const Words all = kColumnwise ? Words{} : lanes::broadcast(shifts[i / kSpan]);
    const Words elements = kTable ? zeros_as_rule(lanes::all_elements<E>(all)) : Words{};
    const auto codes = lanes::load_codes<E, kSpan>(codes_at(row, i));
    Words other{};
#pragma GCC unroll 2
    for (int64_t g = 0; g < kSpan / kLanes; ++g) {
      const Words code = codes[static_cast<size_t>(g)], shift = kColumnwise ? lanes::load(shifts + i + g * kLanes) : all;
      if constexpr (kTable) {
        bits[g] = lanes::looked_up(elements, code);
      } else if constexpr (E::mantissa_bits > 1) {  // with many binades few elements lie below the normal ones
        bits[g] = lanes::decode_normal<E>(code, shift, other);
      } else {
        bits[g] = zeros_as_rule(lanes::decode<E>(code, shift, other));
      }
    }
    return !lanes::any(other);
  }
  // Like decode_span(), but for one group and any scales; returns false if it needs the scalar codec.
  [[gnu::always_inline]] bool decode_group(int64_t row, int64_t i, Words& bits) const {
    const Words codes = lanes::load_codes<E, kLanes>(codes_at(row, i))[0];
    const Words scale =
        kColumnwise ? lanes::load_bytes(scales_ + (row >> row_bits_) * cols_ + first_ + i) : lanes::broadcast(scale_at(row, first_ + i));
    Words foreign = (scale < kFirst) | (scale > kLast);
    foreign &= (codes & static_cast<int16_t>(E::magnitude_mask)) != 0;
    bits = zeros_as_rule(lanes::decode<E>(codes, lanes::exponent_shift(scale), foreign));
    foreign |= scale == 255;
    return !lanes::any(foreign);
  }
  [[gnu::always_inline]] Words zeros_as_rule(Words bits) const {
    return how_.rule == ScaleRule::flashinfer && lanes::magnitude(bits) == 0 ? Words{} : bits;
  }

  Quantization how_;
  const uint8_t *codes_, *scales_;
  int64_t cols_, across_, first_, width_;
  int row_bits_, col_bits_;  // blocks are powers of two: a division for each group would cost as much as its decoding
  Codes<E> all_;
};

void store_scalar(bf16* to, uint32_t bits) { *to = bf16{bf16_bits_from_fp32_bits(bits)}; }
void store_scalar(float* to, uint32_t bits) { *to = float_of_bits(bits); }

// Dequantizes rows [begin, end). Returns true if a non-zero element had an extreme scale.
template <class E, int64_t kSpan, bool kColumnwise, class T>
[[gnu::always_inline]] inline bool dequantize_rows(const Dequantize& k, int64_t begin, int64_t end, int16_t* words) {
  const int64_t width = k.out.dim(1);
  const Reader<E, kSpan, kColumnwise> reader(k.x, k.first_col, width);
  bool extreme = false;
  for (int64_t r = begin; r < end; ++r) {
    T* out = k.out.device_data<T>() + r * width;
    const auto take = [out](int64_t c, Words bits) __attribute__((always_inline)) { lanes::store(out + c, bits); };
    const auto scalar = [&](int64_t c) {
      extreme |= reader.extreme(r, c);
      for (int64_t i = c; i < c + kLanes; ++i) store_scalar(out + i, reader.fp32(r, i));
    };
    reader.decode_row(r, words, take, scalar);
  }
  return extreme;
}
template <class E, int64_t kSpan, bool kColumnwise>
[[gnu::always_inline]] inline bool dequantize_to(const Dequantize& k, int64_t begin, int64_t end, int16_t* words) {
  return k.out.dtype() == Dtype::bf16 ? dequantize_rows<E, kSpan, kColumnwise, bf16>(k, begin, end, words)
                                      : dequantize_rows<E, kSpan, kColumnwise, float>(k, begin, end, words);
}
template <class E>
[[gnu::always_inline]] inline bool dequantize_as(const Dequantize& k, int64_t begin, int64_t end, int16_t* words) {
  return k.x.how.columnwise() ? dequantize_to<E, kPair, true>(k, begin, end, words) : dequantize_to<E, kPair, false>(k, begin, end, words);
}

// Requantizes one row block to columnwise codes, by way of its values. bf16 holds them exactly if every group is regular; else the blocks
// are quantized one by one from fp32. `values` has room for the rows.
template <class E>
[[gnu::always_inline]] inline void requantize_row_block(const RequantizeColumns& k, int64_t row, bf16* values, int16_t* words) {
  const int64_t height = k.out.how.block_rows, block = std::min(height, k.x.shape[0] - row), cols = k.x.shape[1];
  const Reader<E, kPair, false> reader(k.x, 0, cols);
  const int64_t next = row + height < k.x.shape[0] ? row + height : row;  // the row block to fetch; after the last one there is none
  bool exact = true;
  for (int64_t r = 0; r < block; ++r) {
    bf16* out = values + r * cols;
    const auto take = [out](int64_t c, Words bits) __attribute__((always_inline)) { lanes::store(out + c, bits); };
    lane::prefetch_row(k.x.codes.device_data<uint8_t>() + std::min(next + r, k.x.shape[0] - 1) * cols, cols);
    reader.decode_row(row + r, words, take, [&exact](int64_t) { exact = false; });
  }
  if (exact) {
    lanes::quantize_columns<E>({values, block, row, row + block, k.out}, words);
    return;
  }
  const auto bits = [&](int64_t r, int64_t c) { return reader.fp32(r, c); };
  uint8_t* scales = k.out.scales.device_data<uint8_t>() + row / height * cols;
  for (int64_t c = 0; c < cols; ++c) scales[c] = quantize_block<E>({row, block, c, 1}, k.out.how, Codes<E>(k.out), bits);
}

// Dequantizes rows [begin, end) one by one.
template <class E>
bool dequantize_ragged(Backend& device, const Dequantize& k, int64_t begin, int64_t end, int16_t* words) {
  const Quantization& how = k.x.how;
  const int64_t width = k.out.dim(1), across = k.x.scales.dim(1), bytes = k.out.dtype() == Dtype::bf16 ? 2 : 4;
  const QuantizedTensor row = padded_room<0>(device, 1, width, how);
  std::fill_n(row.codes.device_data<uint8_t>(), row.codes.elements(), uint8_t{0});
  std::fill_n(row.scales.device_data<uint8_t>(), row.scales.elements(), uint8_t{127});
  thread_local std::vector<float> room;
  if (room.size() < static_cast<size_t>(row.shape[1])) room.resize(static_cast<size_t>(row.shape[1]));
  auto* const values = reinterpret_cast<std::byte*>(room.data());
  const Tensor out(device, std::shared_ptr<std::byte>(std::shared_ptr<void>(), values), true, k.out.dtype(), row.shape);
  bool extreme = false;
  for (int64_t r = begin; r < end; ++r) {
    std::copy_n(k.x.codes.device_data<uint8_t>() + (r * k.x.shape[1] + k.first_col) / E::codes_per_byte, width / E::codes_per_byte,
                row.codes.device_data<uint8_t>());
    std::copy_n(k.x.scales.device_data<uint8_t>() + r / how.block_rows * across + k.first_col / how.block_cols,
                ceil_div(width, how.block_cols), row.scales.device_data<uint8_t>());
    extreme |= cloned<dequantize_as<E>>(Dequantize{.x = row, .out = out}, 0, 1, words);
    std::copy_n(values, width * bytes, k.out.device_bytes() + r * width * bytes);
  }
  return extreme;
}

template <class E>
void requantize_ragged(const RequantizeColumns& k, int64_t row, bf16* values, int16_t* words) {
  const int64_t cols = k.x.shape[1], rows = std::min(k.out.how.block_rows, k.x.shape[0] - row);
  Backend& device = k.x.device();
  const QuantizedTensor x = padded_room<0>(device, rows, cols, k.x.how), out = padded_room<1>(device, rows, cols, k.out.how);
  copy_rows(k.x.codes, row, x.codes, 0, rows);
  copy_rows(k.x.scales, row, x.scales, 0, rows);
  cloned<requantize_row_block<E>>(RequantizeColumns{.x = x, .out = out}, 0, values, words);
  copy_rows(out.codes, 0, k.out.codes, row, rows);
  copy_rows(out.scales, 0, k.out.scales, row / k.out.how.block_rows, 1);
}

// The lanes decode blocks of a power of two: 32, 64, 128 ..., and 1 x 16 of E2M1, which only fake quantization has, in whole spans.
bool taken_by_lanes(const Quantization& how) { return std::has_single_bit(static_cast<uint64_t>(how.block())) && how.block() % kPair == 0; }

}  // namespace

void CpuBackend::execute(const Dequantize& k) {
  const Quantization& how = k.x.how;
  if (how.format == Format::nvfp4) {
    if ((k.x.shape[1] | k.first_col | k.out.dim(1)) % kLanes != 0) return CpuReference::execute(k);
    const lanes::Nvfp4Tables& tables = lanes::Nvfp4Tables::get();
    return parallel_for(k.x.shape[0], rows_per_piece(k.out.dim(1)), [&](int64_t begin, int64_t end) {
      k.out.dtype() == Dtype::bf16 ? cloned<lanes::dequantize_nvfp4<bf16>>(k, tables, begin, end)
                                   : cloned<lanes::dequantize_nvfp4<float>>(k, tables, begin, end);
    });
  }
  const bool groups = how.format == Format::e2m1 && how.rowwise() && how.block() == kLanes;
  const int64_t span = groups ? kLanes : kPair, each = how.format == Format::e2m1 ? 2 : 1;
  const bool whole = (k.x.shape[1] | k.first_col | k.out.dim(1)) % span == 0;
  if (groups ? !whole : !taken_by_lanes(how) || k.first_col % each != 0 || k.out.dim(1) % each != 0) return CpuReference::execute(k);
  std::atomic<bool> extreme = false;
  parallel_for(k.x.shape[0], rows_per_piece(k.out.dim(1)), [&](int64_t begin, int64_t end) {
    int16_t* words = words_of_columns(round_up(k.out.dim(1), kPair));
    const auto decode = [&]<class E>() {
      return whole ? cloned<dequantize_as<E>>(k, begin, end, words) : dequantize_ragged<E>(*this, k, begin, end, words);
    };
    if (groups ? cloned<dequantize_to<E2M1, kLanes, false>>(k, begin, end, words) : with_element(how.format, decode)) extreme = true;
  });
  if (extreme && k.extreme.defined()) *k.extreme.device_data<int32_t>() = 1;
}

void CpuBackend::execute(const RequantizeColumns& k) {
  if (!taken_by_lanes(k.x.how) || k.out.how.rowwise()) return CpuReference::execute(k);
  const int64_t block = k.out.how.block_rows, cols = round_up(k.x.shape[1], kPair);
  const bool whole = cols == k.x.shape[1], e4m3 = k.x.how.format == Format::e4m3;
  const auto requantize = e4m3 ? (whole ? cloned<requantize_row_block<E4M3>> : requantize_ragged<E4M3>)
                               : (whole ? cloned<requantize_row_block<E5M2>> : requantize_ragged<E5M2>);
  parallel_for(ceil_div(k.x.shape[0], block), std::max<int64_t>(1, rows_per_piece(cols) / block), [&](int64_t begin, int64_t end) {
    thread_local std::vector<bf16> values;
    if (values.size() < static_cast<size_t>(block * cols)) values.resize(static_cast<size_t>(block * cols));
    for (int64_t row_block = begin; row_block < end; ++row_block) {
      requantize(k, row_block * block, values.data(), words_of_columns(cols));
    }
  });
}

}  // namespace mantissa
