// Calls that the host makes to a device of CUDA: memory, copies, marks. chip/runtime.cpp has them for a GPU, tests/simt/runtime.cpp for the
// executor of the host, whose streams are threads that come late. Each has a gpu/runtime.h, which adds the launch of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "backend/gpus.h"

namespace mantissa::gpu {

struct Facts {
  std::string name;
  int64_t memory;    // bytes
  int architecture;  // ten times the compute capability
};
Gpus find_gpus();
std::optional<Gpu> find_gpu(int index);
int count_gpus();
// Makes this the device of the calling thread, and of what it makes later. Throws Error(environment) that says what was found instead.
Facts open_device(int index);
int current_device();  // device of the calling thread, 0 until it opens one

// Device memory, and pinned memory of the host; null: there is no more. Memory that goes back may still be in use by work on a stream:
// giving it back waits for that.
std::byte* take_memory(int64_t bytes);
void give_memory(std::byte* memory) noexcept;
std::byte* take_staging(int64_t bytes);
void give_staging(std::byte* memory) noexcept;

class Stream;
std::shared_ptr<Stream> make_stream(Lane lane = Lane::compute);  // that of communication has the highest priority
void* handle_of(Stream& stream);                                 // the handle that libraries take
using Event = std::shared_ptr<const void>;

// These run in the order of the stream. discard() says that nobody needs what the memory holds.
void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
void copy_on_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes);
void discard(Stream& stream, std::byte* memory, int64_t bytes);
Event record(Stream& stream);
void follow(Stream& stream, const Event& event);

bool reached(const Event& event);  // throws what a kernel or copy of its stream has failed with
double seconds(const Event& from, const Event& to);
void drain(Stream& stream) noexcept;  // returns when the stream uses no memory any more, also where it has failed

struct Grid {
  int64_t blocks;
  unsigned threads;
  size_t shared = 0;  // bytes of a block's launched_shared()
};
template <class... Operands>
struct KernelLaunch {
  void (*kernel)(Operands...);
  Grid grid;
};

}  // namespace mantissa::gpu
