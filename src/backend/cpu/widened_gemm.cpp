#include "backend/cpu/widened_gemm.h"

namespace mantissa {

Tensor high_precision(const Value& value, Dtype dtype, const Tensor& extreme) {
  const auto* quantized = std::get_if<QuantizedTensor>(&value);
  if (!quantized) return converted(std::get<Tensor>(value), dtype);
  Tensor out = empty(quantized->device(), dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32, quantized->shape);
  quantized->device().run(Dequantize{.x = *quantized, .out = out, .extreme = extreme});
  return converted(out, dtype);
}

Tensor dequantized_columns(const Operand& b, Dtype dtype, int64_t first, int64_t width, const Tensor& extreme) {
  const auto& quantized = std::get<QuantizedTensor>(b.value);
  if (b.transposed) return high_precision(slice(quantized, first, first + width), dtype, extreme);
  Tensor out = empty(quantized.device(), dtype, {quantized.shape[0], width});
  quantized.device().run(Dequantize{.x = quantized, .out = out, .first_col = first, .extreme = extreme});
  return out;
}

}  // namespace mantissa
