// Operands that begin at multiples of 16 bytes. Kernels and libraries read rows by 16 bytes and choose by alignment how they multiply; an
// operand that begins elsewhere is copied first, so that a result has the same bits wherever its operands lie.
#pragma once

#include <bit>

#include "mantissa/backend/functions.h"

namespace mantissa::gpu {

enum class Contents { read, overwritten };
// Returns the tensor if it begins at a multiple of 16 bytes, else a new one that does, with the same values if they are read.
inline Tensor aligned(Backend& device, const Tensor& x, Contents contents = Contents::read) {
  if (std::bit_cast<uintptr_t>(x.device_bytes()) % 16 == 0) return x;
  const Tensor out = empty_like(x);
  if (contents == Contents::read) device.run(Convert{.x = x, .out = out});
  return out;
}
// Like aligned() above, but for an operand that is read; codes stay where they are.
inline Value aligned(Backend& device, const Value& x) {
  const auto* const values = std::get_if<Tensor>(&x);
  return values ? Value(aligned(device, *values, Contents::read)) : x;
}
// Copies back to a tensor that aligned() has replaced by another one; else does nothing.
inline void copy_back(Backend& device, const Tensor& from, const Tensor& to) {
  if (from.device_bytes() != to.device_bytes()) device.run(Convert{.x = from, .out = to});
}

}  // namespace mantissa::gpu
