#include "backend/cpu/widened_gemm.h"

#include "mantissa/backend/functions.h"

namespace mantissa {

Tensor high_precision(const Value& value, Dtype dtype, const Tensor& extreme) {
  const auto* quantized = std::get_if<QuantizedTensor>(&value);
  if (!quantized) return converted(std::get<Tensor>(value), dtype);
  Tensor out = empty(quantized->device(), dtype == Dtype::bf16 ? Dtype::bf16 : Dtype::f32, quantized->shape);
  quantized->device().run(Dequantize{.x = *quantized, .out = out, .extreme = extreme});
  return converted(out, dtype);
}

Tensor dequantized_band(const Operand& b, Dtype dtype, int64_t first, int64_t width, const Tensor& extreme) {
  const auto& quantized = std::get<QuantizedTensor>(b.value);
  if (b.transposed) return high_precision(slice(quantized, first, first + width), dtype, extreme);
  Tensor out = empty(quantized.device(), dtype, {quantized.shape[0], width});
  quantized.device().run(Dequantize{.x = quantized, .out = out, .first_col = first, .extreme = extreme});
  return out;
}

void multiply_widened(Backend& device, const Gemm& k, Dtype wide) {
  const bool rounds = k.out.dtype() == Dtype::bf16;
  const Tensor out = rounds ? empty(device, wide, k.out.shape()) : k.out;
  device.run(Gemm{.a = {high_precision(k.a.value, wide), k.a.transposed},
                  .b = {high_precision(k.b.value, wide), k.b.transposed},
                  .out = out,
                  .accumulate = k.accumulate,
                  .bias = k.bias.defined() ? converted(k.bias, wide) : Tensor()});
  if (rounds) device.run(Convert{.x = out, .out = k.out});
}

}  // namespace mantissa
