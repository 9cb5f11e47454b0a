// What the host asks of a GPU, by the runtime library of CUDA. tests/simt/gpu/runtime.h has the same for the executor of the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

namespace mantissa::gpu {

struct Facts {
  std::string name;
  int64_t memory;  // bytes
  int multiprocessors;
};
// Makes the device that of this process. Throws Error(environment) that says what was found instead.
Facts open_device(int index);

// Device memory, and pinned memory of the host; null: there is no more.
std::byte* take_memory(int64_t bytes);
void give_memory(std::byte* memory) noexcept;
std::byte* take_staging(int64_t bytes);
void give_staging(std::byte* memory) noexcept;

struct Stream {
  cudaStream_t handle = nullptr;
};
std::shared_ptr<Stream> make_stream();
using Event = std::shared_ptr<const void>;

// In the order of the stream. discard() says that nobody needs what the memory holds.
void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
inline void discard(Stream&, std::byte*, int64_t) {}
Event record(Stream& stream);
void follow(Stream& stream, const Event& event);

bool reached(const Event& event);  // throws what a kernel or copy before it has failed with
double seconds(const Event& from, const Event& to);

struct Grid {
  int64_t blocks;
  unsigned threads;
};
void launch(Stream& stream, const void* kernel, Grid grid, void** arguments);
template <class... P>
void launch(Stream& stream, void (*kernel)(P...), Grid grid, std::type_identity_t<P>... arguments) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied byte by byte");
  void* addresses[] = {&arguments...};
  launch(stream, reinterpret_cast<const void*>(kernel), grid, addresses);
}

}  // namespace mantissa::gpu
