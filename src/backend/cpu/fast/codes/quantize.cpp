#include <algorithm>
#include <atomic>
#include <vector>

#include "backend/cpu/fast/codes/quantize_row_blocks.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/quantized_rows.h"
#include "backend/cpu/reference/reference.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/with_element.h"

namespace mantissa {
namespace {

// Quantizes bf16, row block by row block: quantize_row_blocks.h in clones.

using lanes::RowBlock, lanes::kLanes, lanes::kPair;

template <class E>
[[gnu::always_inline]] inline bool quantize_as(const RowBlock& row_block, int16_t* words) {
  return row_block.out.how.rowwise() ? lanes::quantize_rows<E, kPair>(row_block, words) : lanes::quantize_columns<E>(row_block, words);
}

// The lanes take blocks of 32, 64, 96 ... and, of E2M1, which is fake-quantized in others as well, rows of 16, 48 ...
bool taken_by_lanes(const Quantize& k) {
  const Quantization& how = k.out.how;
  if (k.x.dtype() != Dtype::bf16) return false;
  if (how.block() % kPair == 0 && k.x.dim(1) % kPair == 0) return true;
  return how.format == Format::e2m1 && how.rowwise() && how.block() % kLanes == 0;
}

bool quantize_row_block(const RowBlock& row_block, int16_t* words) {
  if (row_block.out.how.block() % kPair != 0) return cloned<lanes::quantize_rows<E2M1, kLanes>>(row_block, words);
  switch (row_block.out.how.format) {
    case Format::e4m3: return cloned<quantize_as<E4M3>>(row_block, words);
    case Format::e5m2: return cloned<quantize_as<E5M2>>(row_block, words);
    case Format::none:  // its contract refuses it
    case Format::e2m1: break;
  }
  return cloned<quantize_as<E2M1>>(row_block, words);
}

}  // namespace

void CpuBackend::execute(const Quantize& k) {
  if (!taken_by_lanes(k)) return CpuReference::execute(k);
  const int64_t height = k.out.how.block(), rows = k.out.shape[0], cols = k.x.dim(1);
  std::atomic<bool> nonfinite = false;
  parallel_for(ceil_div(rows, height), std::max<int64_t>(1, rows_per_piece(cols) / height), [&](int64_t begin, int64_t end) {
    thread_local std::vector<int16_t> words;
    if (words.size() < static_cast<size_t>(cols)) words.resize(static_cast<size_t>(cols));
    for (int64_t i = begin; i < end; ++i) {  // block by block: what the first pass read is still in cache for the second
      const int64_t first = i * height, last = std::min(rows, first + height),
                    given = std::clamp<int64_t>(k.x.dim(0) - first, 0, last - first);
      const bf16* x = k.x.device_data<bf16>() + std::min(first, k.x.dim(0)) * cols;
      if (quantize_row_block({x, given, first, last, k.out}, words.data())) nonfinite = true;
      if (k.second.defined()) quantize_row_block({x, given, first, last, k.second}, words.data());
    }
  });
  if (nonfinite && k.nonfinite.defined()) *k.nonfinite.device_data<int32_t>() = 1;
}

namespace {

// Statistics of codes against the values they stand for: row blocks in parallel, then their sums in order.

struct Sums {
  double signal = 0.0, noise = 0.0;
  int64_t clipped = 0, flushed = 0;
  uint32_t amax = 0;  // fp32 bits; those of NaN are the largest
  int64_t rows = 0;

  void add(uint32_t x, uint32_t code, uint32_t largest) {
    const uint32_t magnitude = x & ~kFp32Sign;
    const auto value = static_cast<double>(float_of_bits(x)), error = value - static_cast<double>(float_of_bits(code));
    signal += value * value;
    noise += error * error;
    clipped += magnitude > largest && magnitude <= kFp32Inf;
    flushed += magnitude != 0 && (code & ~kFp32Sign) == 0;
    amax = std::max(amax, magnitude);
  }
  void add(const Sums& other) {
    signal += other.signal;
    noise += other.noise;
    clipped += other.clipped;
    flushed += other.flushed;
    amax = std::max(amax, other.amax);
    rows += other.rows;
  }
};

// Returns which rows count; null: all.
const int32_t* rows_of(const QuantizationError& k) { return k.rows.defined() ? k.rows.device_data<int32_t>() : nullptr; }

// Returns whether some row of these blocks counts.
bool any_counts(const QuantizationError& k, int64_t block_row) {
  const int32_t* const rows = rows_of(k);
  const int64_t first = block_row * k.q.how.block_rows, last = std::min(first + k.q.how.block_rows, k.x.dim(0));
  return !rows || std::any_of(rows + first, rows + last, [](int32_t row) { return row >= 0; });
}

// Statistics of the block rows [begin, end).
template <class E, class T>
Sums sums_of(const QuantizationError& k, int64_t begin, int64_t end) {
  const Codes<E> codes(k.q);
  const Quantization& how = k.q.how;
  const int64_t cols = k.x.dim(1), across = k.q.scales.dim(1);
  const uint8_t* scales = k.q.scales.device_data<uint8_t>();
  const T* x = k.x.device_data<T>();
  const int32_t* const rows = rows_of(k);
  Sums sums;
  for (int64_t r = begin * how.block_rows; r < std::min(end * how.block_rows, k.x.dim(0)); ++r) {
    if (rows && rows[r] < 0) continue;
    ++sums.rows;
    for (int64_t c = 0; c < cols; ++c) {
      const uint8_t scale = scales[r / how.block_rows * across + c / how.block_cols];
      const uint32_t largest = E::decode(static_cast<uint8_t>(E::max_code), scale);
      sums.add(fp32_bits(x[r * cols + c]), decode_in_block<E>(codes.get(r, c), scale, how.rule), largest);
    }
  }
  return sums;
}

template <class E, class T>
Sums sums_of(const QuantizationError& k, int64_t row_blocks) {
  constexpr int64_t kRows = 64;  // rows of elements in a piece
  const int64_t chunk = std::max<int64_t>(1, kRows / k.q.how.block_rows);
  std::vector<Sums> pieces(static_cast<size_t>(ceil_div(row_blocks, chunk)));
  parallel_for(row_blocks, chunk,
               [&](int64_t begin, int64_t end) { pieces[static_cast<size_t>(begin / chunk)] = sums_of<E, T>(k, begin, end); });
  Sums total;
  for (const Sums& piece : pieces) total.add(piece);
  return total;
}

}  // namespace

void CpuReference::execute(const QuantizationError& k) {
  const int64_t row_blocks = ceil_div(k.x.dim(0), k.q.how.block_rows);
  const Sums sums = with_element(k.q.how.format, [&]<class E>() {
    return k.x.dtype() == Dtype::f32 ? sums_of<E, float>(k, row_blocks) : sums_of<E, bf16>(k, row_blocks);
  });
  double* out = k.out.device_data<double>();
  std::fill(out, out + QuantizationError::size, 0.0);
  out[QuantizationError::signal] = sums.signal;
  out[QuantizationError::noise] = sums.noise;
  out[QuantizationError::clipped] = static_cast<double>(sums.clipped);
  out[QuantizationError::flushed] = static_cast<double>(sums.flushed);
  out[QuantizationError::amax] = static_cast<double>(float_of_bits(sums.amax));
  out[QuantizationError::elements] = static_cast<double>(sums.rows * k.x.dim(1));
  const uint8_t* scales = k.q.scales.device_data<uint8_t>();
  const int64_t across = k.q.scales.dim(1);
  for (int64_t r = 0; r < row_blocks; ++r) {
    if (!any_counts(k, r)) continue;
    for (int64_t i = r * across; i < (r + 1) * across; ++i) ++out[QuantizationError::scales + scales[i]];
  }
}

}  // namespace mantissa
