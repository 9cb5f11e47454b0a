// What libraries need that work on the GPU beside the backend of CUDA.
#pragma once

#include "mantissa/backend/backend.h"

namespace mantissa {

int count_gpus();  // that this process sees; 0 in a build without CUDA

// In cuda/cuda_stream.cpp alone. Makes the default GPU that of this thread, and returns the stream (cudaStream_t) of this thread's lane of
// a device of CUDA. The first throws Error(environment) where there is no such GPU.
void use_default_gpu();
void* cuda_stream(Backend& device);

}  // namespace mantissa
