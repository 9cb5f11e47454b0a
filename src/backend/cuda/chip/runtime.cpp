#include "gpu/runtime.h"

#include <cuda_runtime_api.h>

#include "mantissa/base/error.h"

namespace mantissa::gpu {
namespace {

void check(cudaError_t status, const char* what) {
  require(status == cudaSuccess, ExitCode::environment, "CUDA: ", what, ": ", cudaGetErrorString(status));
}

class Mark {
 public:
  Mark() { check(cudaEventCreate(&event_), "no event"); }
  ~Mark() { cudaEventDestroy(event_); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  cudaEvent_t event() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};
cudaEvent_t event_of(const Event& event) { return static_cast<const Mark*>(event.get())->event(); }

}  // namespace

class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "no stream"); }
  ~Stream() { cudaStreamDestroy(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

Facts open_device(int index) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  require(status == cudaSuccess && count > 0, ExitCode::environment, "no GPU: ", cudaGetErrorString(status));
  require(index >= 0 && index < count, ExitCode::environment, "no GPU ", index, ": this host has ", count);
  check(cudaSetDevice(index), "the device cannot be used");
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, index), "the device does not say what it is");
  return {.name = facts.name, .memory = static_cast<int64_t>(facts.totalGlobalMem), .multiprocessors = facts.multiProcessorCount};
}

std::byte* take_memory(int64_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) == cudaSuccess) return static_cast<std::byte*>(memory);
  static_cast<void>(cudaGetLastError());  // forgotten: it is told with the size
  return nullptr;
}
void give_memory(std::byte* memory) noexcept { cudaFree(memory); }
std::byte* take_staging(int64_t bytes) {
  void* memory = nullptr;
  if (cudaMallocHost(&memory, static_cast<size_t>(bytes)) == cudaSuccess) return static_cast<std::byte*>(memory);
  static_cast<void>(cudaGetLastError());
  return nullptr;
}
void give_staging(std::byte* memory) noexcept { cudaFreeHost(memory); }

std::shared_ptr<Stream> make_stream() { return std::make_shared<Stream>(); }

void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream.handle()), "a copy to the device");
}
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream.handle()), "a copy from the device");
}
void discard(Stream&, std::byte*, int64_t) {}

Event record(Stream& stream) {
  auto mark = std::make_shared<Mark>();
  check(cudaEventRecord(mark->event(), stream.handle()), "a mark");
  return mark;
}
void follow(Stream& stream, const Event& event) { check(cudaStreamWaitEvent(stream.handle(), event_of(event), 0), "a wait between lanes"); }
bool reached(const Event& event) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status != cudaErrorNotReady) check(status, "a kernel or copy failed");
  return status == cudaSuccess;
}
double seconds(const Event& from, const Event& to) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)), "the time between two marks");
  return double{milliseconds} * 1e-3;
}
void drain(Stream& stream) noexcept { cudaStreamSynchronize(stream.handle()); }

void launch(Stream& stream, const void* kernel, Grid grid, void** arguments) {
  require(grid.blocks > 0 && grid.blocks <= 0x7fffffff, "a launch of ", grid.blocks, " blocks");
  check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(grid.blocks)), dim3(grid.threads), arguments, 0, stream.handle()), "a launch");
}

}  // namespace mantissa::gpu
