// What the host asks of a device whose kernels the executor runs: each stream is a thread that comes late (lane_thread.h). Downloads and
// freed memory are poisoned in the order of their stream. src/backend/cuda/chip/gpu/runtime.h is that of a chip.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>

namespace mantissa::gpu {

struct Facts {
  std::string name;
  int64_t memory;  // bytes
  int multiprocessors;
};
Facts open_device(int index);

// Device memory, and host memory that copies of streams may use; null: there is no more.
std::byte* take_memory(int64_t bytes);
void give_memory(std::byte* memory) noexcept;
std::byte* take_staging(int64_t bytes);
void give_staging(std::byte* memory) noexcept;

class Stream;
std::shared_ptr<Stream> make_stream();
using Event = std::shared_ptr<const void>;

// In the order of the stream. discard() says that nobody needs what the memory holds.
void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
void discard(Stream& stream, std::byte* memory, int64_t bytes);
Event record(Stream& stream);
void follow(Stream& stream, const Event& event);

bool reached(const Event& event);  // throws what a stream has failed with
double seconds(const Event& from, const Event& to);

struct Grid {
  int64_t blocks;
  unsigned threads;
};
void launch(Stream& stream, Grid grid, std::function<void()> body);
template <class... P>
void launch(Stream& stream, void (*kernel)(P...), Grid grid, std::type_identity_t<P>... arguments) {
  static_assert((std::is_trivially_copyable_v<P> && ...), "arguments are copied byte by byte");
  launch(stream, grid, [=] { kernel(arguments...); });
}

}  // namespace mantissa::gpu
