#include "backend/cuda/gemm/aligned.h"

#include <bit>

#include "mantissa/backend/functions.h"

namespace mantissa::gpu {

Tensor aligned(Backend& device, const Tensor& x, Contents contents) {
  if (std::bit_cast<uintptr_t>(x.device_bytes()) % 16 == 0) return x;
  const Tensor out = empty_like(x);
  if (contents == Contents::read) device.run(Convert{.x = x, .out = out});
  return out;
}

Value aligned(Backend& device, const Value& x) {
  const auto* const values = std::get_if<Tensor>(&x);
  return values ? Value(aligned(device, *values, Contents::read)) : x;
}

void copy_back(Backend& device, const Tensor& from, const Tensor& to) {
  if (from.device_bytes() != to.device_bytes()) device.run(Convert{.x = from, .out = to});
}

}  // namespace mantissa::gpu
