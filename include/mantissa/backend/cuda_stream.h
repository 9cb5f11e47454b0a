// Access to the GPU for libraries that work on it beside the CUDA backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mantissa/backend/backend.h"

namespace mantissa {

namespace gpu {
class Stream;
}

int count_gpus();  // number of GPUs that this process sees; 0 in a build without CUDA

// The rest is in cuda/cuda_stream.cpp alone.

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
