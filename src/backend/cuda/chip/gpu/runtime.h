// Launches kernels on a GPU, by the runtime library of CUDA. tests/simt/gpu/runtime.h launches them on the executor of the host.
#pragma once

#include <type_traits>

#include "backend/cuda/runtime_calls.h"

namespace mantissa::gpu {

void launch(Stream& stream, const void* kernel, Grid grid, void** arguments);
template <class... P>
void launch(Stream& stream, void (*kernel)(P...), Grid grid, std::type_identity_t<P>... arguments) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied byte by byte");
  void* addresses[] = {&arguments...};
  launch(stream, reinterpret_cast<const void*>(kernel), grid, addresses);
}

}  // namespace mantissa::gpu
