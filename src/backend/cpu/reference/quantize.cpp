// Quantizing kernels block by block and element by element, as block_scale.h defines them.
#include <algorithm>
#include <atomic>

#include "backend/cpu/quantized_rows.h"
#include "backend/cpu/reference/reference.h"
#include "base/parallel.h"
#include "mantissa/backend/functions.h"
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
        body(Block{i * how.block_rows, how.block_rows, j * how.block_cols, how.block_cols}, scales[i * across + j]);
      }
    }
  });
}

template <class T>
void quantize(const Quantize& k, const QuantizedTensor& out) {
  const T* x = k.x.device_data<T>();
  const int64_t rows = k.x.dim(0), cols = k.x.dim(1);
  const auto bits = [=](int64_t r, int64_t c) { return r < rows ? fp32_bits(x[r * cols + c]) : 0U; };
  with_element(out.how.format, [&]<class E>() {
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
      const uint32_t bits = decode_in_block<E>(code, scale, k.x.how.rule);
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

}  // namespace

void CpuReference::execute(const Quantize& k) {
  const bool wide = k.x.dtype() == Dtype::f32;
  for (const QuantizedTensor* out : {&k.out, &k.second}) {
    if (out->defined()) wide ? quantize<float>(k, *out) : quantize<bf16>(k, *out);
  }
  if (k.nonfinite.defined() && (wide ? holds_nonfinite<float>(k.x) : holds_nonfinite<bf16>(k.x))) *k.nonfinite.device_data<int32_t>() = 1;
}

void CpuReference::execute(const Dequantize& k) {
  with_element(k.x.how.format, [&]<class E>() { k.out.dtype() == Dtype::bf16 ? dequantize<E, bf16>(k) : dequantize<E, float>(k); });
}

void CpuReference::execute(const FakeQuantize& k) {
  const QuantizedTensor codes = quantized(k.x, k.how);
  k.x.device().run(Dequantize{.x = codes, .out = k.out});
}

void CpuReference::execute(const RequantizeColumns& k) {
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

}  // namespace mantissa
