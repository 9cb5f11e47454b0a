#include "mantissa/backend/functions.h"

#include <cstring>

namespace mantissa {

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

}  // namespace mantissa
