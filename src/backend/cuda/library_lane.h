// What the host asks of a device of CUDA for libraries beside the backend (mantissa/backend/cuda_stream.h), in the two runtime.cpp.
#pragma once

#include "backend/cuda/runtime_calls.h"

namespace mantissa::gpu {

int count_gpus();
void* stream_of(const Event& event);  // that it is a point of, as libraries take it

}  // namespace mantissa::gpu
