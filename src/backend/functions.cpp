#include "mantissa/backend/functions.h"

#include <algorithm>

#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

QuantizedTensor quantized_rows(const Tensor& x, const Quantization& how, int64_t rows) {
  QuantizedTensor out = empty_quantized(x.device(), {rows, x.dim(1)}, how);
  x.device().run(Quantize{.x = x, .out = out});
  return out;
}

}  // namespace

Tensor empty(Backend& device, Dtype dtype, Shape shape) {
  const int64_t bytes = shape.elements() * dtype_bytes(dtype);
  return Tensor(device, device.allocate(bytes), device.host_memory(), dtype, shape);
}

Tensor empty_like(const Tensor& tensor) { return empty(tensor.device(), tensor.dtype(), tensor.shape()); }

Tensor zeros(Backend& device, Dtype dtype, Shape shape) {
  Tensor out = empty(device, dtype, shape);
  device.run(Fill{.out = out, .value = 0.0});
  return out;
}

Tensor from_host(Backend& device, Dtype dtype, Shape shape, const void* data) {
  Tensor out = empty(device, dtype, shape);
  device.upload(data, out);
  return out;
}

HostBytes::HostBytes(const Tensor& tensor) {
  const auto size = static_cast<size_t>(tensor.bytes());
  if (tensor.device().host_memory()) {
    bytes_ = {tensor.device_bytes(), size};
  } else {
    copy_.resize(size);
    tensor.device().download(tensor, copy_.data());
    bytes_ = copy_;
  }
}

void for_each_piece(const Tensor& tensor, const std::function<void(std::span<const std::byte>)>& body) {
  constexpr int64_t kPieceBytes = 16 << 20;
  const int64_t step = tensor.device().host_memory() ? std::max<int64_t>(1, tensor.elements()) : kPieceBytes / dtype_bytes(tensor.dtype());
  const Tensor flat = tensor.view({tensor.elements()});
  for (int64_t begin = 0; begin < flat.dim(0); begin += step) body(HostBytes(flat.slice(begin, std::min(flat.dim(0), begin + step))).get());
}

void fill_from_host(const Tensor& tensor, const std::function<void(std::span<std::byte>)>& fill) {
  const auto size = static_cast<size_t>(tensor.bytes());
  if (tensor.device().host_memory()) return fill({tensor.device_bytes(), size});
  std::vector<std::byte> bytes(size);
  fill(bytes);
  tensor.device().upload(bytes.data(), tensor);
}

std::optional<NonfiniteElement> nonfinite_element(const Tensor& tensor) {
  const int64_t index = first_nonfinite(tensor.dtype(), HostBytes(tensor).get());
  if (index < 0) return {};
  const Tensor element = tensor.view({tensor.elements()}).slice(index, index + 1);
  return NonfiniteElement{
      .index = index,
      .value = tensor.dtype() == Dtype::f64 ? to_host<double>(element)[0] : double{to_host<float>(converted(element, Dtype::f32))[0]}};
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

QuantizedTensor quantized(const Tensor& x, const Quantization& how) { return quantized_rows(x, how, x.dim(0)); }

QuantizedTensor quantized_padded(const Tensor& x, const Quantization& how) {
  return quantized_rows(x, how, round_up(x.dim(0), how.block()));
}

Tensor decoded(const QuantizedTensor& codes, Dtype dtype) {
  Tensor out = empty(codes.device(), dtype, codes.shape);
  codes.device().run(Dequantize{.x = codes, .out = out});
  return out;
}

QuantizedTensor slice(const QuantizedTensor& tensor, int64_t begin, int64_t end) {
  const int64_t block = tensor.how.block_rows;
  require(begin % block == 0 && (end % block == 0 || end == tensor.shape[0]), "slice [", begin, ", ", end, ") of ", tensor.shape,
          " cuts a block of ", tensor.how);
  return {.codes = tensor.codes.slice(begin, end),
          .scales = tensor.scales.slice(begin / block, ceil_div(end, block)),
          .shape = tensor.shape.with_dim0(end - begin),
          .how = tensor.how};
}

Bytes::Bytes(const Tensor& tensor)
    : Bytes(tensor.device_bytes(), tensor.bytes(), tensor.device().host_memory() ? nullptr : &tensor.device()) {}

Bytes Bytes::slice(int64_t begin, int64_t end) const {
  require(begin >= 0 && begin <= end && end <= size, "bytes [", begin, ", ", end, ") are not among ", size);
  return {data + begin, end - begin, device};
}

std::span<std::byte> Bytes::host() const {
  require(!device, size, " bytes are in the memory of a device, but must be on the host");
  return {data, static_cast<size_t>(size)};
}

Tensor Bytes::tensor() const {
  require(device != nullptr, size, " bytes are on the host, but must be in the memory of a device");
  return {*device, std::shared_ptr<std::byte>(std::shared_ptr<void>(), data), false, Dtype::u8, {size}};
}

}  // namespace mantissa
