// Quantising bf16 in bands of whole blocks, 16 lanes at a time. Blocks that code_lanes.h does not cover (non-finite, or with tiny scales)
// go through the scalar codecs one by one, so every bit is the reference's.
#include <algorithm>
#include <atomic>
#include <vector>

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

// One output of a pass over x [rows, cols]; rows of the output beyond x are zeros.
struct Job {
  const bf16* x;
  int64_t rows, cols;
  const QuantizedTensor& out;

  uint32_t bits(int64_t row, int64_t col) const { return row < rows ? fp32_bits(x[row * cols + col]) : 0U; }
};

// Bands of rows of one output. Within a band rows are read one after another, twice: for the largest magnitudes, column by column, and to
// encode with what they give. Walking down columns instead throws lines out of a cache of few ways where rows are a power of two apart.
template <class E>
class Band {
 public:
  explicit Band(const Job& job)
      : job_(job),
        how_(job.out.how),
        codes_(job.out.codes.data<uint8_t>()),
        scales_(job.out.scales.data<uint8_t>()),
        scale_cols_(job.out.scales.dim(1)) {}

  // One row of 1 x b blocks. Returns whether a value was not finite.
  [[gnu::always_inline]] bool row(int64_t r) const {
    bool nonfinite = false;
    uint8_t* scale = scales_ + r * scale_cols_;
    for (int64_t c = 0; c < job_.cols; c += how_.block_cols, ++scale) {
      Words amax{}, shift;
      for (int64_t i = c; i < c + how_.block_cols; i += kLanes) amax = lanes::max(amax, lanes::magnitude(load(r, i)));
      if (!regular(lanes::largest(amax), *scale, shift, nonfinite)) {
        *scale = scalar({r, 1, c, how_.block_cols});
        continue;
      }
      for (int64_t i = c; i < c + how_.block_cols; i += kLanes) encode(r, i, shift);
    }
    return nonfinite;
  }

  // Tiles, or b x 1 blocks, of the band that starts at `first`. `columns` holds a word for each column.
  [[gnu::always_inline]] bool band(int64_t first, int16_t* columns) const {
    std::fill(columns, columns + job_.cols, int16_t{0});
    const int64_t end = first + how_.block_rows;
    for (int64_t r = first; r < std::min(end, job_.rows); ++r) {
      for (int64_t c = 0; c < job_.cols; c += kLanes) {
        lanes::store(columns + c, lanes::max(lanes::load(columns + c), lanes::magnitude(load(r, c))));
      }
    }
    bool covered = true;
    const bool nonfinite = how_.tiles() ? tile_shifts(first, columns, covered) : column_shifts(first, columns, covered);
    for (int64_t r = first; r < end; ++r) {
      for (int64_t c = 0; c < job_.cols; c += kLanes) encode(r, c, lanes::load(columns + c));
    }
    if (!covered) again(first);
    return nonfinite;
  }

 private:
  [[gnu::always_inline]] Words load(int64_t r, int64_t c) const {
    return r < job_.rows ? lanes::load(job_.x + r * job_.cols + c) : Words{};
  }
  [[gnu::always_inline]] void encode(int64_t r, int64_t c, Words shift) const {
    lanes::store_codes<E>(codes_ + (r * job_.cols + c) / E::codes_per_byte, lanes::encode<E>(load(r, c), shift));
  }

  // Scale and shift of a block from its largest magnitude; false if the block is for the scalar codec.
  [[gnu::always_inline]] bool regular(int32_t amax, uint8_t& scale, Words& shift, bool& nonfinite) const {
    scale = amax < 0x7F80 ? block_scale<E>(static_cast<uint32_t>(amax) << 16, how_.rule) : kScaleNan;
    shift = amax == 0 ? Words{} : lanes::exponent_shift(lanes::broadcast(scale));
    nonfinite |= scale == kScaleNan;
    return amax == 0 || (scale >= lanes::kFirstRegularScale<E> && scale != kScaleNan);
  }

  // From largest magnitudes to shifts, in place; scales are written on the way. `covered` becomes false if a block is not regular.
  [[gnu::always_inline]] bool column_shifts(int64_t first, int16_t* columns, bool& covered) const {
    Words bad{}, infinite{};
    uint8_t* scales = scales_ + first / how_.block_rows * scale_cols_;
    for (int64_t c = 0; c < job_.cols; c += kLanes) {
      const Words amax = lanes::load(columns + c), scale = lanes::scale_of<E>(amax, how_.rule);
      bad |= lanes::irregular<E>(amax, scale);
      infinite |= amax >= 0x7F80;
      lanes::store(columns + c, amax == 0 ? Words{} : lanes::exponent_shift(scale));
      lanes::store_bytes(scales + c, scale);
    }
    covered = !lanes::any(bad);
    return lanes::any(infinite);
  }
  [[gnu::always_inline]] bool tile_shifts(int64_t first, int16_t* columns, bool& covered) const {
    bool nonfinite = false;
    uint8_t* scale = scales_ + first / how_.block_rows * scale_cols_;
    for (int64_t c = 0; c < job_.cols; c += how_.block_cols, ++scale) {
      Words amax{}, shift;
      for (int64_t i = c; i < c + how_.block_cols; i += kLanes) amax = lanes::max(amax, lanes::load(columns + i));
      covered &= regular(lanes::largest(amax), *scale, shift, nonfinite);
      for (int64_t i = c; i < c + how_.block_cols; i += kLanes) lanes::store(columns + i, shift);
    }
    return nonfinite;
  }

  // A band with blocks that the lanes do not cover, block by block.
  [[gnu::noinline]] void again(int64_t first) const {
    uint8_t* scale = scales_ + first / how_.block_rows * scale_cols_;
    for (int64_t c = 0; c < job_.cols; c += how_.block_cols) *scale++ = scalar({first, how_.block_rows, c, how_.block_cols});
  }
  [[gnu::noinline]] uint8_t scalar(const Block& block) const {
    const auto bits = [this](int64_t r, int64_t c) { return job_.bits(r, c); };
    return quantize_block<E>(block, how_.rule, Codes<E>(job_.out), bits);
  }

  const Job& job_;
  const Quantization& how_;
  uint8_t *codes_, *scales_;
  int64_t scale_cols_;
};

// The band of rows at `first`, as many as the longer side of a block.
template <class E>
[[gnu::always_inline]] inline bool quantize_band(const Job& job, int64_t first, int16_t* columns) {
  const Band<E> band(job);
  if (!job.out.how.rowwise()) return band.band(first, columns);
  bool nonfinite = false;
  const int64_t end = std::min(first + job.out.how.block(), job.out.shape[0]);
  for (int64_t r = first; r < end; ++r) nonfinite |= band.row(r);
  return nonfinite;
}
MANTISSA_CLONES bool quantize_e4m3(const Job& job, int64_t first, int16_t* columns) { return quantize_band<E4M3>(job, first, columns); }
MANTISSA_CLONES bool quantize_e5m2(const Job& job, int64_t first, int16_t* columns) { return quantize_band<E5M2>(job, first, columns); }
MANTISSA_CLONES bool quantize_e2m1(const Job& job, int64_t first, int16_t* columns) { return quantize_band<E2M1>(job, first, columns); }

bool quantize_any(const Job& job, int64_t first, int16_t* columns) {
  switch (job.out.how.format) {
    case Format::e4m3: return quantize_e4m3(job, first, columns);
    case Format::e5m2: return quantize_e5m2(job, first, columns);
    default: return quantize_e2m1(job, first, columns);
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
    thread_local std::vector<int16_t> columns;
    if (columns.size() < static_cast<size_t>(cols)) columns.resize(static_cast<size_t>(cols));
    for (int64_t i = begin; i < end; ++i) {  // band by band: what the first pass read is still in cache for the second
      if (quantize_any(first, i * band, columns.data())) nonfinite = true;
      if (k.second.defined()) quantize_any(second, i * band, columns.data());
    }
  });
  if (nonfinite && k.nonfinite.defined()) *k.nonfinite.data<int32_t>() = 1;
}

}  // namespace mantissa
