// Makes the backend of CUDA: in cuda/cuda_backend.cpp, or in no_cuda.cpp where this build has none.
#pragma once

#include <memory>

#include "mantissa/backend/backend.h"

namespace mantissa {

// Throws Error(environment) where this build or this host has none.
std::unique_ptr<Backend> make_cuda_backend(int gpu);

}  // namespace mantissa
