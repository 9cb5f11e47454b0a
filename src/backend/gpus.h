// The GPUs of this host, as this build finds them: in cuda/cuda_backend.cpp, or in no_cuda.cpp of a build without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "mantissa/backend/backend.h"

namespace mantissa {

struct Gpus {
  bool usable;           // make_backend("cuda") opens the default GPU
  std::string text;      // driver, runtime and each GPU, with what keeps it from being used, or what is missing
  int architecture = 0;  // ten times the compute capability of the default GPU
};
Gpus find_gpus();

struct Gpu {
  std::string name;    // as its driver says it: "NVIDIA H100 80GB HBM3"
  int64_t memory = 0;  // bytes
  int64_t free = 0;    // free bytes of it; the context of this process has its memory already
  uint64_t place = 0;  // equal for all processes that use this GPU, and for no others
};
// Returns GPU `index` of this host; none where it cannot be used. Makes the context of this process there, of some hundred MiB.
std::optional<Gpu> find_gpu(int index);

// Most bytes that a GEMM of cuBLASLt may take beside its operands, as NVIDIA advises for Hopper.
inline constexpr int64_t kGemmWorkspace = int64_t{32} << 20;

// Makes the backend of CUDA. Throws Error(environment) where this build or this host has none.
std::unique_ptr<Backend> make_cuda_backend(int gpu);

// The GPU that make_backend("cuda") opens in this process, by its number on this host; 0 at first. Ranks of one host take one each.
void set_default_gpu(int index);
int default_gpu();

// Access to the GPU for libraries that work on it beside the CUDA backend.

namespace gpu {
class Stream;
}

int count_gpus();  // number of GPUs that this process sees; 0 in a build without CUDA

// The rest is in cuda/cuda_backend.cpp alone.

// Returns the stream (cudaStream_t) of this thread's lane of a device of CUDA.
void* cuda_stream(Backend& device);

// Memory of the default GPU and a stream of its own, beside all backends. Makes that GPU the current one of this thread. Throws
// Error(environment) if there is no such GPU, or no memory.
class CudaScratch {
 public:
  explicit CudaScratch(int64_t bytes);
  ~CudaScratch();  // waits for the stream
  CudaScratch(const CudaScratch&) = delete;
  CudaScratch& operator=(const CudaScratch&) = delete;

  std::byte* memory() const { return memory_; }
  void* stream() const;  // cudaStream_t
  // Returns whether the stream has done all work that it had before the first call. Throws the error of work that failed.
  bool finished();

 private:
  std::shared_ptr<gpu::Stream> stream_;
  std::byte* memory_ = nullptr;
  Backend::Mark end_;
};

}  // namespace mantissa
