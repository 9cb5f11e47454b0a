// Statistics of codes against the values they stand for: row blocks in parallel, then their sums in order.
#include <algorithm>
#include <vector>

#include "backend/cpu/quantized_rows.h"
#include "backend/cpu/reference/reference.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/base/parallel.h"
#include "mantissa/formats/with_element.h"

namespace mantissa {
namespace {

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
