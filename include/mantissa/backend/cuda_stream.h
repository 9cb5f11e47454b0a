// What libraries need that work on the GPU beside the backend of CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "mantissa/backend/backend.h"

namespace mantissa {

namespace gpu {
class Stream;
}

int count_gpus();  // that this process sees; 0 in a build without CUDA

// The rest is in cuda/cuda_stream.cpp alone.

// Returns the stream (cudaStream_t) of this thread's lane of a device of CUDA.
void* cuda_stream(Backend& device);

// Memory of the default GPU and a stream of its own, beside all backends. Makes the GPU that of this thread, and throws Error(environment)
// where there is none such, or no memory.
class CudaScratch {
 public:
  explicit CudaScratch(int64_t bytes);
  ~CudaScratch();  // waits for the stream
  CudaScratch(const CudaScratch&) = delete;
  CudaScratch& operator=(const CudaScratch&) = delete;

  std::byte* memory() const { return memory_; }
  void* stream() const;  // cudaStream_t
  // Returns whether the stream has done what it was asked for before the first call. Throws what that has failed with.
  bool finished();

 private:
  std::shared_ptr<gpu::Stream> stream_;
  std::byte* memory_ = nullptr;
  Backend::Mark end_;
};

}  // namespace mantissa
