// Quantising bf16 in bands of whole blocks, 16 lanes at a time. Blocks that code_lanes.h does not cover (non-finite, or with tiny scales)
// go through the scalar codecs one by one, so every bit is the reference's.
#include <algorithm>
#include <array>
#include <atomic>
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

alignas(32) constexpr std::array<bf16, kLanes> kZeros{};

// One output of a pass over x [rows, cols]; rows of the output beyond x are zeros.
struct Job {
  const bf16* x;
  int64_t rows, cols;
  const QuantizedTensor& out;

  const bf16* at(int64_t row, int64_t col) const { return row < rows ? x + row * cols + col : kZeros.data(); }
  uint32_t bits(int64_t row, int64_t col) const { return row < rows ? fp32_bits(x[row * cols + col]) : 0U; }
};

template <class E>
class Band {
 public:
  explicit Band(const Job& job)
      : job_(job), how_(job.out.how), codes_(job.out.codes.data<uint8_t>()), scales_(job.out.scales.data<uint8_t>()) {}

  // Rows [row, row + rows) of 1 x b blocks. Returns whether a value was not finite.
  [[gnu::always_inline]] bool rowwise(int64_t row, int64_t rows) const {
    bool nonfinite = false;
    for (int64_t r = row; r < row + rows; ++r) {
      for (int64_t c = 0; c < job_.cols; c += how_.block_cols) nonfinite |= block(r, 1, c);
    }
    return nonfinite;
  }

  [[gnu::always_inline]] bool tiles(int64_t row) const {
    bool nonfinite = false;
    for (int64_t c = 0; c < job_.cols; c += how_.block_cols) nonfinite |= block(row, how_.block_rows, c);
    return nonfinite;
  }

  // b x 1 blocks of the band that starts at `row`.
  [[gnu::always_inline]] bool columnwise(int64_t row) const {
    bool nonfinite = false;
    for (int64_t c = 0; c < job_.cols; c += kLanes) {
      const Words amax = largest(row, how_.block_rows, c, kLanes), scale = lanes::scale_of<E>(amax, how_.rule);
      nonfinite |= lanes::any(amax >= 0x7F80);
      if (lanes::any(lanes::irregular<E>(amax, scale))) {
        for (int64_t i = c; i < c + kLanes; ++i) scalar({row, how_.block_rows, i, 1});
        continue;
      }
      encode(row, how_.block_rows, c, kLanes, amax == 0 ? Words{} : lanes::exponent_shift(scale));
      lanes::store_bytes(scales_ + row / how_.block_rows * job_.cols + c, scale);
    }
    return nonfinite;
  }

 private:
  // A block that shares one scale: a piece of a row, or a tile.
  [[gnu::always_inline]] bool block(int64_t row, int64_t rows, int64_t col) const {
    const int32_t amax = lanes::largest(largest(row, rows, col, how_.block_cols));
    const uint8_t scale = amax < 0x7F80 ? block_scale<E>(static_cast<uint32_t>(amax) << 16, how_.rule) : kScaleNan;
    if (amax != 0 && (scale < lanes::kFirstRegularScale<E> || scale == kScaleNan)) {
      scalar({row, rows, col, how_.block_cols});
      return amax >= 0x7F80;
    }
    encode(row, rows, col, how_.block_cols, amax == 0 ? Words{} : lanes::exponent_shift(lanes::broadcast(scale)));
    scale_at(row, col) = scale;
    return false;
  }

  [[gnu::always_inline]] Words largest(int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    Words amax{};
    for (int64_t r = row; r < row + rows; ++r) {
      const bf16* x = job_.at(r, col);
      for (int64_t c = 0; c < cols; c += kLanes) amax = lanes::max(amax, lanes::magnitude(lanes::load(r < job_.rows ? x + c : x)));
    }
    return amax;
  }

  [[gnu::always_inline]] void encode(int64_t row, int64_t rows, int64_t col, int64_t cols, Words shift) const {
    for (int64_t r = row; r < row + rows; ++r) {
      const bf16* x = job_.at(r, col);
      uint8_t* out = codes_ + (r * job_.cols + col) / E::codes_per_byte;
      for (int64_t c = 0; c < cols; c += kLanes) {
        lanes::store_codes<E>(out + c / E::codes_per_byte, lanes::encode<E>(lanes::load(r < job_.rows ? x + c : x), shift));
      }
    }
  }

  uint8_t& scale_at(int64_t row, int64_t col) const {
    return scales_[row / how_.block_rows * (job_.cols / how_.block_cols) + col / how_.block_cols];
  }

  [[gnu::noinline]] void scalar(const Block& block) const {
    const auto bits = [this](int64_t r, int64_t c) { return job_.bits(r, c); };
    scale_at(block.row, block.col) = quantize_block<E>(block, how_.rule, Codes<E>(job_.out), bits);
  }

  const Job& job_;
  const Quantization& how_;
  uint8_t *codes_, *scales_;
};

// Blocks of bands [begin, end), a band being as many rows as the longer side of a block.
template <class E>
[[gnu::always_inline]] inline bool quantize_bands(const Job& job, int64_t begin, int64_t end) {
  const Quantization& how = job.out.how;
  const Band<E> band(job);
  bool nonfinite = false;
  for (int64_t row = begin * how.block(); row < end * how.block(); row += how.block()) {
    if (how.rowwise()) {
      nonfinite |= band.rowwise(row, std::min(how.block(), job.out.shape[0] - row));
    } else {
      nonfinite |= how.tiles() ? band.tiles(row) : band.columnwise(row);
    }
  }
  return nonfinite;
}
MANTISSA_CLONES bool quantize_e4m3(const Job& job, int64_t begin, int64_t end) { return quantize_bands<E4M3>(job, begin, end); }
MANTISSA_CLONES bool quantize_e5m2(const Job& job, int64_t begin, int64_t end) { return quantize_bands<E5M2>(job, begin, end); }
MANTISSA_CLONES bool quantize_e2m1(const Job& job, int64_t begin, int64_t end) { return quantize_bands<E2M1>(job, begin, end); }

bool quantize_range(const Job& job, int64_t begin, int64_t end) {
  switch (job.out.how.format) {
    case Format::e4m3: return quantize_e4m3(job, begin, end);
    case Format::e5m2: return quantize_e5m2(job, begin, end);
    default: return quantize_e2m1(job, begin, end);
  }
}

}  // namespace

void CpuBackend::run(const Quantize& k) {
  check(k);
  const int64_t band = k.out.how.block(), rows = k.out.shape[0], cols = k.x.dim(1);
  if (k.x.dtype() != Dtype::bf16 || band % kLanes != 0 || cols % kLanes != 0) return CpuReference::run(k);
  const Job first{k.x.data<bf16>(), k.x.dim(0), cols, k.out}, second{k.x.data<bf16>(), k.x.dim(0), cols, k.second};
  std::atomic<bool> nonfinite = false;
  parallel_for((rows + band - 1) / band, std::max<int64_t>(1, rows_per_piece(cols) / band), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {  // band by band: what the first pass read is still in cache for the second
      if (quantize_range(first, i, i + 1)) nonfinite = true;
      if (k.second.defined()) quantize_range(second, i, i + 1);
    }
  });
  if (nonfinite && k.nonfinite.defined()) *k.nonfinite.data<int32_t>() = 1;
}

}  // namespace mantissa
