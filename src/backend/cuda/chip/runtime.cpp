#include "gpu/runtime.h"

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "mantissa/base/trace.h"

namespace mantissa::gpu {
namespace {

// Returns true if a host or its GPU is to blame. All else is a bug.
bool is_of_environment(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
    case cudaErrorInitializationError:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorLaunchTimeout:
    case cudaErrorOperatingSystem: return true;
    default: return false;
  }
}

void check(cudaError_t status, const char* what) {
  require(status == cudaSuccess, is_of_environment(status) ? ExitCode::environment : ExitCode::internal, "CUDA: ", what,
          " failed: ", cudaGetErrorString(status));
}

constexpr int kOldest = 80;  // ten times the compute capability

int architecture_of(const cudaDeviceProp& facts) { return facts.major * 10 + facts.minor; }

// Returns why this build cannot run on a GPU, or nothing. One without machine code for it compiles PTX, which a driver older than the
// toolkit does not know. One that was compiled fast would be many times as slow, without a word.
std::string obstacle_of(const cudaDeviceProp& facts) {
  if (architecture_of(facts) < kOldest) return "too old: compute capability 8.0 or later is needed";
  if (MANTISSA_CUDA_COMPILED_FAST) return "the kernels of this build are not optimized: build with -DMANTISSA_CUDA_FAST_COMPILE=OFF";
  const bool compiled = std::string_view(MANTISSA_CUDA_CODE).find(text("sm_", architecture_of(facts))) != std::string_view::npos;
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (compiled || driver >= runtime) return "";
  return "this build has no machine code for it, and its driver is older than the PTX: install a newer driver";
}

// Marks spans as NVTX ranges, which profilers show beside the kernels.
constexpr SpanHook kRanges{.begin = [](const char* name) { nvtxRangePushA(name); }, .end = [] { nvtxRangePop(); }};

// Writes 13000 as 13.0.
std::string version(int number) { return text(number / 1000, '.', number % 1000 / 10); }

cudaEvent_t event_of(const Event& event) { return static_cast<cudaEvent_t>(const_cast<void*>(event.get())); }

}  // namespace

class Stream {
 public:
  // Blocks of a message start before those of GEMMs that were launched earlier and wait for a multiprocessor.
  explicit Stream(Lane lane) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "reading the priorities of streams");
    check(cudaStreamCreateWithPriority(&handle_, cudaStreamNonBlocking, lane == Lane::communication ? greatest : least),
          "creating a stream");
  }
  ~Stream() { cudaStreamDestroy(handle_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t handle() const { return handle_; }

 private:
  cudaStream_t handle_ = nullptr;
};

Gpus find_gpus() {
  int driver = 0, runtime = 0, count = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  if (driver == 0) return {.usable = false, .text = "no NVIDIA driver is loaded (libcuda.so.1)"};
  std::string found = text("driver of CUDA ", version(driver), ", runtime ", version(runtime), ", code for ", MANTISSA_CUDA_CODE);
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return {.usable = false, .text = text(found, ": ", cudaGetErrorString(status))};
  Gpus out{.usable = false, .text = ""};
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp facts{};
    if (cudaGetDeviceProperties(&facts, i) != cudaSuccess) continue;
    const std::string obstacle = obstacle_of(facts);
    if (i == default_gpu()) out.usable = obstacle.empty(), out.architecture = architecture_of(facts);
    found += text("; GPU ", i, ": ", facts.name, ", compute capability ", facts.major, '.', facts.minor, ", ", facts.totalGlobalMem >> 30,
                  " GiB", obstacle.empty() ? "" : text(" (", obstacle, ')'));
  }
  out.text = found;
  return out;
}

std::optional<Gpu> find_gpu(int index) {
  cudaDeviceProp facts{};
  size_t free = 0, all = 0;
  const bool usable = cudaGetDeviceProperties(&facts, index) == cudaSuccess && cudaSetDevice(index) == cudaSuccess &&
                      cudaMemGetInfo(&free, &all) == cudaSuccess;
  if (!usable) {
    static_cast<void>(cudaGetLastError());  // forgotten: open_device() says it
    return {};
  }
  return Gpu{.name = facts.name,
             .memory = static_cast<int64_t>(all),
             .free = static_cast<int64_t>(free),
             .place = xxh64(std::as_bytes(std::span(facts.uuid.bytes))).value};
}

int count_gpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

Facts open_device(int index) {
  const int count = count_gpus();
  require(count > 0, ExitCode::environment, "no GPU can be used: ", find_gpus().text);
  require(index < count, ExitCode::environment, "there is no GPU for local rank ", index, ": this host has ", count,
          "; start at most that many ranks on it, or show it more GPUs with CUDA_VISIBLE_DEVICES");
  cudaDeviceProp facts{};
  check(cudaGetDeviceProperties(&facts, index), "reading the properties of the device");
  require(obstacle_of(facts).empty(), ExitCode::environment, "GPU ", index, " cannot be used: ", find_gpus().text);
  check(cudaSetDevice(index), "selecting the device");
  set_span_hook(&kRanges);
  return {.name = facts.name, .memory = static_cast<int64_t>(facts.totalGlobalMem), .architecture = architecture_of(facts)};
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "reading the device of this thread");
  return device;
}

std::byte* take_memory(int64_t bytes) {
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) == cudaSuccess) return static_cast<std::byte*>(memory);
  static_cast<void>(cudaGetLastError());  // clears the error: the allocator throws one that names the size
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

std::shared_ptr<Stream> make_stream(Lane lane) { return std::make_shared<Stream>(lane); }
void* handle_of(Stream& stream) { return stream.handle(); }

void copy_to_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream.handle()), "copying to the device");
}
void copy_to_host(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, stream.handle()), "copying from the device");
}
void copy_on_device(Stream& stream, std::byte* to, const std::byte* from, int64_t bytes) {
  check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream.handle()), "copying on the device");
}
void discard(Stream&, std::byte*, int64_t) {}

// Events of a device that no mark has any more. To make one takes the host longer than to record it.
class IdleEvents {
 public:
  cudaEvent_t take(int device) {
    const std::lock_guard lock(mutex_);
    std::vector<cudaEvent_t>& own = by_device_[device];
    cudaEvent_t event = nullptr;
    if (own.empty()) {
      check(cudaEventCreate(&event), "creating an event");
    } else {
      event = own.back();
      own.pop_back();
    }
    return event;
  }
  void give(int device, cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    by_device_[device].push_back(event);
  }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<cudaEvent_t>> by_device_;
};

Event record(Stream& stream) {
  static auto* const idle = new IdleEvents;  // marks may go after it would
  const int device = current_device();
  const cudaEvent_t event = idle->take(device);
  const Event mark(event, [device](cudaEvent_t own) { idle->give(device, own); });
  check(cudaEventRecord(event, stream.handle()), "recording an event");
  return mark;
}
void follow(Stream& stream, const Event& event) { check(cudaStreamWaitEvent(stream.handle(), event_of(event), 0), "waiting for an event"); }
bool reached(const Event& event) {
  const cudaError_t status = cudaEventQuery(event_of(event));
  if (status != cudaErrorNotReady) check(status, "a kernel or a copy");
  return status == cudaSuccess;
}
double seconds(const Event& from, const Event& to) {
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)), "measuring the time between two events");
  return double{milliseconds} * 1e-3;
}
void drain(Stream& stream) noexcept { cudaStreamSynchronize(stream.handle()); }

constexpr size_t kSharedOfEveryKernel = size_t{48} << 10;  // bytes; more has to be asked for

// Allows shared memory once for each kernel of a device, which is always launched with as much; and as much of the cache as can be, so that
// several blocks have room.
void allow_shared(const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::set<std::pair<int, const void*>> allowed;
  const int device = current_device();
  const std::lock_guard lock(mutex);
  if (allowed.contains({device, kernel})) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "allowing a kernel more shared memory");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "dividing the cache of a kernel");
  allowed.insert({device, kernel});
}

void launch(Stream& stream, const void* kernel, Grid grid, void** arguments) {
  require(grid.blocks > 0 && grid.blocks <= 0x7fffffff, "a launch must have 1 to 2147483647 blocks, got ", grid.blocks);
  if (grid.shared > kSharedOfEveryKernel) allow_shared(kernel, grid.shared);
  check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(grid.blocks)), dim3(grid.threads), arguments, grid.shared, stream.handle()),
        "launching a kernel");
}

}  // namespace mantissa::gpu
