// Dequantising and columnwise requantisation, 16 lanes at a time. Elements and scales that code_lanes.h does not cover go through the
// scalar codecs, so every bit is the reference's.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "backend/checks.h"
#include "backend/cpu/code_lanes.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/quantized_rows.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/parallel.h"
#include "mantissa/formats/with_element.h"

namespace mantissa {
namespace {

using lanes::kLanes, lanes::Words;

// Codes and scales of a matrix as the kernels read them: 16 codes of a row at a time.
template <class E>
class Reader {
 public:
  explicit Reader(const QuantizedTensor& x)
      : how_(x.how),
        codes_(x.codes.data<uint8_t>()),
        scales_(x.scales.data<uint8_t>()),
        cols_(x.shape[1]),
        row_bits_(std::countr_zero(static_cast<uint64_t>(how_.block_rows))),
        col_bits_(std::countr_zero(static_cast<uint64_t>(how_.block_cols))),
        all_(x) {}

  // bf16 bits; false if the group needs the scalar codec.
  [[gnu::always_inline]] bool decode(int64_t row, int64_t col, Words& bits) const {
    const Words codes = lanes::load_codes<E>(codes_ + (row * cols_ + col) / E::codes_per_byte), scale = scales(row, col);
    Words foreign = (scale < static_cast<int16_t>(kFirst)) | (scale > static_cast<int16_t>(254 - E::emax));
    foreign &= (codes & static_cast<int16_t>(E::magnitude_mask)) != 0;
    bits = lanes::decode<E>(codes, lanes::exponent_shift(scale), foreign);
    foreign |= scale == 255;
    if (how_.rule == ScaleRule::flashinfer) bits = lanes::magnitude(bits) == 0 ? Words{} : bits;
    return !lanes::any(foreign);
  }

  uint32_t fp32(int64_t row, int64_t col) const { return decode_in_block<E>(all_.get(row, col), scale_at(row, col), how_.rule); }

  // Whether a non-zero element of the group has an extreme scale.
  bool extreme(int64_t row, int64_t col) const {
    for (int64_t c = col; c < col + kLanes; ++c) {
      if ((all_.get(row, c) & E::magnitude_mask) != 0 && extreme_scale<E>(scale_at(row, c))) return true;
    }
    return false;
  }

 private:
  static constexpr int kFirst = E::bias + E::mantissa_bits;

  uint8_t scale_at(int64_t row, int64_t col) const { return scales_[(row >> row_bits_) * (cols_ >> col_bits_) + (col >> col_bits_)]; }
  [[gnu::always_inline]] Words scales(int64_t row, int64_t col) const {
    return how_.columnwise() ? lanes::load_bytes(scales_ + (row >> row_bits_) * cols_ + col) : lanes::broadcast(scale_at(row, col));
  }

  Quantization how_;
  const uint8_t *codes_, *scales_;
  int64_t cols_;
  int row_bits_, col_bits_;  // blocks are powers of two: a division for each group would cost as much as its decoding
  Codes<E> all_;
};

[[gnu::always_inline]] inline void store(bf16* to, Words bits) { std::memcpy(&to->bits, &bits, sizeof bits); }
[[gnu::always_inline]] inline void store(float* to, Words bits) {
  using Wide = uint32_t __attribute__((vector_size(64)));
  const Wide wide = __builtin_convertvector(reinterpret_cast<lanes::Unsigned>(bits), Wide) << 16;
  std::memcpy(to, &wide, sizeof wide);
}
void store_scalar(bf16* to, uint32_t bits) { *to = bf16{bf16_bits_from_fp32_bits(bits)}; }
void store_scalar(float* to, uint32_t bits) { *to = float_of_bits(bits); }

// Rows [begin, end). Returns whether a non-zero element had an extreme scale.
template <class E, class T>
[[gnu::always_inline]] inline bool dequantize_rows(const Dequantize& k, int64_t begin, int64_t end) {
  const Reader<E> reader(k.x);
  const int64_t cols = k.x.shape[1];
  T* out = k.out.data<T>();
  bool extreme = false;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < cols; c += kLanes) {
      Words bits;
      if (reader.decode(r, c, bits)) {
        store(out + r * cols + c, bits);
        continue;
      }
      extreme |= reader.extreme(r, c);
      for (int64_t i = c; i < c + kLanes; ++i) store_scalar(out + r * cols + i, reader.fp32(r, i));
    }
  }
  return extreme;
}
template <class E>
[[gnu::always_inline]] inline bool dequantize_to(const Dequantize& k, int64_t begin, int64_t end) {
  return k.out.dtype() == Dtype::bf16 ? dequantize_rows<E, bf16>(k, begin, end) : dequantize_rows<E, float>(k, begin, end);
}
MANTISSA_CLONES bool dequantize_e4m3(const Dequantize& k, int64_t begin, int64_t end) { return dequantize_to<E4M3>(k, begin, end); }
MANTISSA_CLONES bool dequantize_e5m2(const Dequantize& k, int64_t begin, int64_t end) { return dequantize_to<E5M2>(k, begin, end); }
MANTISSA_CLONES bool dequantize_e2m1(const Dequantize& k, int64_t begin, int64_t end) { return dequantize_to<E2M1>(k, begin, end); }

bool dequantize_range(const Dequantize& k, int64_t begin, int64_t end) {
  switch (k.x.how.format) {
    case Format::e4m3: return dequantize_e4m3(k, begin, end);
    case Format::e5m2: return dequantize_e5m2(k, begin, end);
    default: return dequantize_e2m1(k, begin, end);
  }
}

// Columnwise codes of the b x 16 elements at (row, col). Their values are exact in bf16 where every group is regular.
template <class E>
[[gnu::always_inline]] inline void requantize_group(const RequantizeColumns& k, const Reader<E>& reader, int64_t row, int64_t col) {
  const int64_t block = k.out.how.block_rows, cols = k.x.shape[1];
  Words values[128], amax{};
  bool regular = block <= 128;
  for (int64_t r = 0; regular && r < block; ++r) {
    regular = reader.decode(row + r, col, values[r]);
    amax = lanes::max(amax, lanes::magnitude(values[r]));
  }
  const Words scale = lanes::scale_of<E>(amax, k.out.how.rule);
  uint8_t* scales = k.out.scales.data<uint8_t>() + row / block * cols;
  if (!regular || lanes::any(lanes::irregular<E>(amax, scale))) {
    const auto bits = [&](int64_t r, int64_t c) { return reader.fp32(r, c); };
    for (int64_t c = col; c < col + kLanes; ++c) scales[c] = quantize_block<E>({row, block, c, 1}, k.out.how.rule, Codes<E>(k.out), bits);
    return;
  }
  const Words shift = amax == 0 ? Words{} : lanes::exponent_shift(scale);
  uint8_t* codes = k.out.codes.data<uint8_t>() + row * cols + col;
  for (int64_t r = 0; r < block; ++r) lanes::store_bytes(codes + r * cols, lanes::encode<E>(values[r], shift));
  lanes::store_bytes(scales + col, scale);
}

template <class E>
[[gnu::always_inline]] inline void requantize_bands(const RequantizeColumns& k, int64_t begin, int64_t end) {
  const Reader<E> reader(k.x);
  for (int64_t band = begin; band < end; ++band) {
    for (int64_t c = 0; c < k.x.shape[1]; c += kLanes) requantize_group<E>(k, reader, band * k.out.how.block_rows, c);
  }
}
MANTISSA_CLONES void requantize_e4m3(const RequantizeColumns& k, int64_t begin, int64_t end) { requantize_bands<E4M3>(k, begin, end); }
MANTISSA_CLONES void requantize_e5m2(const RequantizeColumns& k, int64_t begin, int64_t end) { requantize_bands<E5M2>(k, begin, end); }

bool whole_lanes(const QuantizedTensor& x) {
  const auto power_of_two = [](int64_t block) { return std::has_single_bit(static_cast<uint64_t>(block)); };
  if (!power_of_two(x.how.block_rows) || !power_of_two(x.how.block_cols)) return false;
  return x.shape[1] % kLanes == 0 && (x.how.columnwise() || x.how.block_cols % kLanes == 0);
}

}  // namespace

void CpuBackend::run(const Dequantize& k) {
  check(k);
  if (!whole_lanes(k.x)) return CpuReference::run(k);
  std::atomic<bool> extreme = false;
  parallel_for(k.x.shape[0], rows_per_piece(k.x.shape[1]), [&](int64_t begin, int64_t end) {
    if (dequantize_range(k, begin, end)) extreme = true;
  });
  if (extreme && k.extreme.defined()) *k.extreme.data<int32_t>() = 1;
}

void CpuBackend::run(const RequantizeColumns& k) {
  check(k);
  if (!whole_lanes(k.x)) return CpuReference::run(k);
  const int64_t block = k.out.how.block_rows;
  parallel_for(k.x.shape[0] / block, std::max<int64_t>(1, rows_per_piece(k.x.shape[1]) / block), [&](int64_t begin, int64_t end) {
    k.x.how.format == Format::e4m3 ? requantize_e4m3(k, begin, end) : requantize_e5m2(k, begin, end);
  });
}

}  // namespace mantissa
