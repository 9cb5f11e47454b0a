// What the host asks of a device whose kernels the executor runs: each stream is a thread that comes late (lane_thread.h). Downloads and
// freed memory are poisoned in the order of their stream. src/backend/cuda/chip/gpu/runtime.h is that of a chip.
#pragma once

#include <atomic>
#include <functional>
#include <type_traits>

#include "backend/cuda/runtime_calls.h"

namespace mantissa::simt {

// MANTISSA_SIMT_ARCHITECTURE, the chip that the executor stands for: then GEMMs go to cuBLASLt as there, whose products
// cublaslt_calls.cpp computes. Without it there is no such library, on 8.0.
bool stands_for_a_chip();
int architecture();

// What find_gpu(0) says of the executor; a test may change it while no other thread asks.
Gpu& described_gpu();

// How many products that library was asked for in this process, by the scales of their operands, and how many algorithms.
struct LibraryGemms {
  int64_t of_values = 0, per_32 = 0, per_128 = 0, algorithms = 0;
};
LibraryGemms library_gemms();
std::atomic<int64_t>& refused_columns();  // of a product for which it refuses the algorithm that others have; 0: of none
std::atomic<bool>& refuses_codes();       // whatever their scales

}  // namespace mantissa::simt

namespace mantissa::gpu {

void submit(Stream& stream, std::function<void()> work);
void launch(Stream& stream, Grid grid, std::function<void()> body);
template <class... P>
void launch(Stream& stream, void (*kernel)(P...), Grid grid, std::type_identity_t<P>... arguments) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied byte by byte");
  launch(stream, grid, [=] { kernel(arguments...); });
}

}  // namespace mantissa::gpu
