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
