// Values of kernels: fp32 and bf16, computed in fp32; and the choice of a kernel by the dtype of its values.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "gpu/device.h"
#include "mantissa/base/integers.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa::gpu {

__device__ inline float value_of(float value) { return value; }
__device__ inline float value_of(bf16 value) { return to_float(value); }

template <class T>
__device__ inline T rounded(float value) {
  if constexpr (std::is_same_v<T, float>)
    return value;
  else
    return to_bf16(value);
}

// Calls body.template operator()<T>() with the C++ type of fp32 or bf16 values. Contracts let no other dtype come here.
template <class Body>
void with_values(Dtype dtype, Body&& body) {
  if (dtype == Dtype::f32) return body.template operator()<float>();
  if (dtype == Dtype::bf16) return body.template operator()<bf16>();
  fail(ExitCode::internal, "kernel of CUDA: values must be fp32 or bf16, got ", dtype);
}

// The memory of an operand, or null if it is missing.
template <class T>
T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.device_data<T>() : nullptr;
}

// Threads of kernels that go through elements, and blocks for so many of them: enough to fill a device, each going on in strides of all.
inline constexpr unsigned kThreads = 256, kWarpsOfBlock = kThreads / kWarp;
inline int64_t blocks_for(int64_t elements) { return std::min<int64_t>(ceil_div(elements, int64_t{kThreads}), int64_t{1} << 16); }

// Blocks of kernels that hardly ever have something to do: two for each multiprocessor of a large GPU.
inline constexpr int64_t kFewBlocks = 264;

// Calls body(i) for the elements of [0, count) that belong to this thread of a grid of blocks_for(count).
template <class Body>
__device__ inline void for_each_element(int64_t count, Body body) {
  const int64_t stride = blocks() * kThreads;
  for (int64_t i = block() * kThreads + thread(); i < count; i += stride) body(i);
}

}  // namespace mantissa::gpu
