// Calls of the host to a device whose kernels the executor runs: each stream is a thread that comes late (lane_thread.h). Downloads and
// freed memory are poisoned in the order of their stream. src/backend/cuda/chip/gpu/runtime.h has them for a chip.
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

// The answer of find_gpu(0) for the executor; a test may change it while no other thread asks.
Gpu& described_gpu();
int& current_device();  // device of the calling thread; the only one there is has the number 0

// Numbers of products that the library was asked for in this process, by the scales of their operands, of all groups at once, of
// algorithms, and of checks whether one fits other sizes.
struct LibraryGemms {
  int64_t of_values = 0, per_16 = 0, per_32 = 0, per_128 = 0, at_once = 0, algorithms = 0, checks = 0;
};
LibraryGemms library_gemms();
std::atomic<int64_t>& refused_columns();  // columns of products for which it refuses the algorithm that others have; 0: none
std::atomic<bool>& refuses_codes();       // codes of any scales
std::atomic<bool>& refuses_groups();      // groups at once

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
