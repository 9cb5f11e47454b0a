// Makes, converts and quantizes tensors of a backend.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

Tensor empty(Backend& device, Dtype dtype, Shape shape);  // not initialized
Tensor empty_like(const Tensor& tensor);
Tensor zeros(Backend& device, Dtype dtype, Shape shape);
Tensor from_host(Backend& device, Dtype dtype, Shape shape, const void* data);  // copies
template <class T>
std::vector<T> to_host(const Tensor& tensor) {  // copies
  require(DtypeOf<T>::value == tensor.dtype(), "to_host: the tensor is ", tensor.dtype(), ", but is read as ", DtypeOf<T>::value);
  std::vector<T> out(static_cast<size_t>(tensor.elements()));
  tensor.device().download(tensor, out.data());
  return out;
}
Tensor converted(const Tensor& tensor, Dtype dtype);  // a new tensor, or the same handle if the dtype is the same

// Gives the host the bytes of a tensor: its memory, or a copy.
class HostBytes {
 public:
  explicit HostBytes(const Tensor& tensor);
  HostBytes(const HostBytes&) = delete;
  HostBytes& operator=(const HostBytes&) = delete;
  std::span<const std::byte> get() const { return bytes_; }

 private:
  std::vector<std::byte> copy_;
  std::span<const std::byte> bytes_;
};
// Calls body for the bytes of a tensor, in order: for all of the host's memory at once, for copies of at most 16 MiB of a device's.
void for_each_piece(const Tensor& tensor, const std::function<void(std::span<const std::byte>)>& body);
// Writes all bytes of the tensor by calling `fill`.
void fill_from_host(const Tensor& tensor, const std::function<void(std::span<std::byte>)>& fill);

// Names the first element that is NaN or Inf.
struct NonfiniteElement {
  int64_t index;
  double value;
};
std::optional<NonfiniteElement> nonfinite_element(const Tensor& tensor);

QuantizedTensor empty_quantized(Backend& device, Shape shape, const Quantization& how);  // not initialized
// quantized() keeps the rows of x; quantized_padded() pads them with zeros to whole blocks, so that codes of tokens along rows and along
// columns have one height.
QuantizedTensor quantized(const Tensor& x, const Quantization& how);
QuantizedTensor quantized_padded(const Tensor& x, const Quantization& how);
// Returns the values of the codes, of the same shape.
Tensor decoded(const QuantizedTensor& codes, Dtype dtype);
// Returns rows [begin, end), both at block boundaries (or, rowwise, anywhere).
QuantizedTensor slice(const QuantizedTensor& tensor, int64_t begin, int64_t end);

// Times what a device does by marks in its lanes, because a host that only asks for it does not see when it is done.

// A point in this thread's lane of a device, or in time where a device has no marks.
class Moment {
 public:
  explicit Moment(Backend& device) : device_(&device), mark_(device.mark()) {}
  // Returns the seconds between two moments that the device has reached.
  double seconds_until(const Moment& later) const {
    if (mark_ && later.mark_) return device_->seconds(mark_, later.mark_);
    return std::chrono::duration<double>(later.host_ - host_).count();
  }

 private:
  Backend* device_;
  Backend::Mark mark_;
  std::chrono::steady_clock::time_point host_ = std::chrono::steady_clock::now();
};

// Bytes of the host or of a device, for whoever moves both.

// A view of memory of the host or of a device, which stays its owner's.
struct Bytes {
  std::byte* data = nullptr;
  int64_t size = 0;
  Backend* device = nullptr;  // null: memory of the host

  Bytes() = default;
  template <std::convertible_to<std::span<std::byte>> Host>
  Bytes(Host&& host) : Bytes(std::span<std::byte>(host).data(), std::ssize(std::span<std::byte>(host))) {}
  Bytes(const Tensor& tensor);  // bytes of the host if the tensor's memory is the host's

  // Returns bytes that are only read.
  static Bytes to_read(std::span<const std::byte> host) { return {const_cast<std::byte*>(host.data()), std::ssize(host)}; }

  Bytes slice(int64_t begin, int64_t end) const;  // bytes [begin, end)
  std::span<std::byte> host() const;              // throws for a device's
  Tensor tensor() const;                          // u8 [size] on the device; owns nothing

 private:
  Bytes(std::byte* at, int64_t count, Backend* of = nullptr) : data(at), size(count), device(of) {}
};

}  // namespace mantissa
