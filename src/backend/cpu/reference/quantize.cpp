// Quantizing kernels block by block and element by element, as block_scale.h defines them.
#include <algorithm>
#include <atomic>
#include <vector>

#include "backend/cpu/quantized_rows.h"
#include "backend/cpu/reference/reference.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
#include "mantissa/base/integers.h"
#include "mantissa/formats/with_element.h"

namespace mantissa {
namespace {

// Calls body(block, its scale) for every block, row blocks in parallel.
template <class Body>
void for_each_block(const QuantizedTensor& tensor, const Body& body) {
  const Quantization& how = tensor.how;
  uint8_t* scales = tensor.scales.device_data<uint8_t>();
  const int64_t row_blocks = tensor.scales.dim(0), across = tensor.scales.dim(1);
  parallel_for(row_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < across; ++j) {
        body(block_at(tensor, i * how.block_rows, j * how.block_cols), scales[i * across + j]);
      }
    }
  });
}

template <class T>
void quantize(const Quantize& k, const QuantizedTensor& out) {
  const T* x = k.x.device_data<T>();
  const int64_t rows = k.x.dim(0), cols = k.x.dim(1);
  const auto bits = [=](int64_t r, int64_t c) { return r < rows ? fp32_bits(x[r * cols + c]) : 0U; };
  with_any_element(out.how.format, [&]<class E>() {
    const Codes<E> codes(out);
    for_each_block(out, [&](const Block& block, uint8_t& scale) { scale = quantize_block<E>(block, out.how, codes, bits); });
  });
}

template <class T>
bool holds_nonfinite(const Tensor& x) {
  const T* data = x.device_data<T>();
  return std::any_of(data, data + x.elements(), [](T value) { return (fp32_bits(value) & ~kFp32Sign) >= kFp32Inf; });
}

template <class E, class T>
void dequantize(const Dequantize& k) {
  const Codes<E> codes(k.x);
  const int64_t width = k.out.dim(1);
  T* out = k.out.device_data<T>();
  for_each_block(k.x, [&](const Block& block, uint8_t scale) {
    if (block.col < k.first_col || block.col >= k.first_col + width) return;
    bool zeros = true;
    for_each_element(block, [&](int64_t r, int64_t c) {
      const uint8_t code = codes.get(r, c);
      const uint32_t bits = decode_in_block<E>(code, scale, k.x.how.code_rule());
      zeros = zeros && (code & E::magnitude_mask) == 0;
      if constexpr (std::is_same_v<T, bf16>) {
        out[r * width + c - k.first_col] = bf16{bf16_bits_from_fp32_bits(bits)};
      } else {
        out[r * width + c - k.first_col] = float_of_bits(bits);
      }
    });
    if (!zeros && extreme_scale<E>(scale) && k.extreme.defined()) std::atomic_ref(*k.extreme.device_data<int32_t>()) = 1;
  });
}

// Writes columnwise codes and scales as rowwise ones of the transpose.
void write_transposed(const QuantizedTensor& columns, const QuantizedTensor& out) {
  for (const auto& [from, to] : {std::pair{columns.codes, out.codes}, std::pair{columns.scales, out.scales}}) {
    const int64_t rows = from.dim(0), cols = from.dim(1);
    for (int64_t i = 0; i < rows * cols; ++i) to.device_data<uint8_t>()[i % cols * rows + i / cols] = from.device_data<uint8_t>()[i];
  }
}

}  // namespace

void CpuReference::execute(const Quantize& k) {
  if (k.second.defined() && k.second.how.rowwise()) {
    const QuantizedTensor columns = empty_quantized(k.x.device(), k.out.shape, k.out.how.transposed());
    k.x.device().run(Quantize{.x = k.x, .out = k.out, .second = columns, .nonfinite = k.nonfinite});
    return write_transposed(columns, k.second);
  }
  const bool wide = k.x.dtype() == Dtype::f32;
  for (const QuantizedTensor* out : {&k.out, &k.second}) {
    if (out->defined()) wide ? quantize<float>(k, *out) : quantize<bf16>(k, *out);
  }
  if (k.nonfinite.defined() && (wide ? holds_nonfinite<float>(k.x) : holds_nonfinite<bf16>(k.x))) *k.nonfinite.device_data<int32_t>() = 1;
}

void CpuReference::execute(const Dequantize& k) {
  with_any_element(k.x.how.format, [&]<class E>() { k.out.dtype() == Dtype::bf16 ? dequantize<E, bf16>(k) : dequantize<E, float>(k); });
}

void CpuReference::execute(const FakeQuantize& k) {
  const QuantizedTensor codes = quantized(k.x, k.how);
  k.x.device().run(Dequantize{.x = codes, .out = k.out});
}

void CpuReference::execute(const RequantizeColumns& k) {
  if (k.out.how.rowwise()) {
    const QuantizedTensor columns = empty_quantized(k.x.device(), k.x.shape, k.x.how.transposed());
    k.x.device().run(RequantizeColumns{.x = k.x, .out = columns});
    return write_transposed(columns, k.out);
  }
  const Tensor values = empty(k.x.device(), Dtype::f32, k.x.shape);
  k.x.device().run(Dequantize{.x = k.x, .out = values});
  k.x.device().run(Quantize{.x = values, .out = k.out});
}

void CpuReference::execute(const SwizzleScales& k) {
  const bool rows = k.x.how.rowwise();
  const int64_t outer_count = k.x.shape[rows ? 0 : 1], inner_count = k.x.scales.dim(rows ? 1 : 0), stride = k.x.scales.dim(1);
  const uint8_t* scales = k.x.scales.device_data<uint8_t>();
  uint8_t* out = k.out.device_data<uint8_t>();
  std::fill(out, out + k.out.elements(), uint8_t{0});
  for (int64_t outer = 0; outer < outer_count; ++outer) {
    for (int64_t inner = 0; inner < inner_count; ++inner) {
      const int64_t from = rows ? outer * stride + inner : inner * stride + outer;
      out[swizzled_offset(outer, inner, inner_count)] = scales[from];
    }
  }
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
      const uint32_t largest = decode_in_block<E>(static_cast<uint8_t>(E::max_code), scale, how.code_rule());
      sums.add(fp32_bits(x[r * cols + c]), decode_in_block<E>(codes.get(r, c), scale, how.code_rule()), largest);
    }
  }
  return sums;
}

}  // namespace

void CpuReference::execute(const QuantizationError& k) {
  const int64_t height = k.q.how.block_rows, row_blocks = ceil_div(k.x.dim(0), height);
  const int64_t chunk = std::max<int64_t>(1, 64 / height);  // pieces of 64 rows of elements
  std::vector<Sums> pieces(static_cast<size_t>(ceil_div(row_blocks, chunk)));
  parallel_for(row_blocks, chunk, [&](int64_t begin, int64_t end) {
    pieces[static_cast<size_t>(begin / chunk)] = with_any_element(k.q.how.format, [&]<class E>() {
      return k.x.dtype() == Dtype::f32 ? sums_of<E, float>(k, begin, end) : sums_of<E, bf16>(k, begin, end);
    });
  });
  Sums sums;
  for (const Sums& piece : pieces) sums.add(piece);
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
  const int32_t* const rows = rows_of(k);
  const auto counts = [](int32_t row) { return row >= 0; };
  for (int64_t r = 0; r < row_blocks; ++r) {
    if (rows && std::none_of(rows + r * height, rows + std::min((r + 1) * height, k.x.dim(0)), counts)) continue;
    for (int64_t i = r * across; i < (r + 1) * across; ++i) ++out[QuantizationError::scales + scales[i]];
  }
}

}  // namespace mantissa
