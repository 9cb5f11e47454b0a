#include "mantissa/backend/functions.h"

#include <cstring>

namespace mantissa {
namespace {

QuantizedTensor quantized_rows(const Tensor& x, const Quantization& how, int64_t block) {
  QuantizedTensor out = empty_quantized(x.device(), {whole_blocks(x.dim(0), block), x.dim(1)}, how);
  x.device().run(Quantize{.x = x, .out = out});
  return out;
}

}  // namespace

Tensor empty(Backend& device, Dtype dtype, Shape shape) {
  const int64_t bytes = shape.elements() * dtype_bytes(dtype);
  return Tensor(device, device.allocate(bytes), 0, dtype, shape);
}

Tensor empty_like(const Tensor& tensor) { return empty(tensor.device(), tensor.dtype(), tensor.shape()); }

Tensor zeros(Backend& device, Dtype dtype, Shape shape) {
  Tensor out = empty(device, dtype, shape);
  device.run(Fill{.out = out, .value = 0.0});
  return out;
}

Tensor from_host(Backend& device, Dtype dtype, Shape shape, const void* data) {
  Tensor out = empty(device, dtype, shape);
  std::memcpy(out.raw(), data, static_cast<size_t>(out.bytes()));
  return out;
}

Tensor converted(const Tensor& tensor, Dtype dtype) {
  if (tensor.dtype() == dtype) return tensor;
  Tensor out = empty(tensor.device(), dtype, tensor.shape());
  tensor.device().run(Convert{.x = tensor, .out = out});
  return out;
}

QuantizedTensor empty_quantized(Backend& device, Shape shape, const Quantization& how) {
  return {.codes = empty(device, Dtype::u8, codes_shape(shape, how)),
          .scales = empty(device, Dtype::u8, scales_shape(shape, how)),
          .shape = shape,
          .how = how};
}

QuantizedTensor quantized(const Tensor& x, const Quantization& how) { return quantized_rows(x, how, how.block_rows); }

QuantizedTensor quantized_padded(const Tensor& x, const Quantization& how) { return quantized_rows(x, how, how.block()); }

QuantizedTensor slice(const QuantizedTensor& tensor, int64_t begin, int64_t end) {
  const int64_t block = tensor.how.block_rows;
  require(begin % block == 0 && end % block == 0, "slice [", begin, ", ", end, ") of ", tensor.shape, " cuts a block of ", tensor.how);
  return {.codes = tensor.codes.slice(begin, end),
          .scales = tensor.scales.slice(begin / block, end / block),
          .shape = tensor.shape.with_dim0(end - begin),
          .how = tensor.how};
}

}  // namespace mantissa
