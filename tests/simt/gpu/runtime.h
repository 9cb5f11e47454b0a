// What the host asks of a device whose kernels the executor runs: each stream is a thread that comes late (lane_thread.h). Downloads and
// freed memory are poisoned in the order of their stream. src/backend/cuda/chip/gpu/runtime.h is that of a chip.
#pragma once

#include <functional>
#include <type_traits>

#include "backend/cuda/runtime_calls.h"

namespace mantissa::gpu {

void launch(Stream& stream, Grid grid, std::function<void()> body);
template <class... P>
void launch(Stream& stream, void (*kernel)(P...), Grid grid, std::type_identity_t<P>... arguments) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied byte by byte");
  launch(stream, grid, [=] { kernel(arguments...); });
}

}  // namespace mantissa::gpu
