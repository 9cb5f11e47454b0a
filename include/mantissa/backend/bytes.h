// Bytes of the host or of a device, for whoever moves both.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

#include "mantissa/tensor/tensor.h"

namespace mantissa {

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
