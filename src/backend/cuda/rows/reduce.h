// Sums and maxima over the threads of a warp or of a block, in an order that depends on the number of threads alone.
#pragma once

#include "gpu/device.h"

namespace mantissa::gpu {

template <class T, class Join>
__device__ inline T join_warp(T value, Join join) {
  for (unsigned lanes = kWarp / 2; lanes > 0; lanes /= 2) value = join(value, shuffle_xor(value, lanes));
  return value;
}

template <class T, class Join>
struct OfWarps {  // the type of its block's memory
  T values[kWarp];
};

// Returns the same in every thread. All threads of the block call it.
template <class T, class Join>
__device__ inline T join_block(T value, T none, Join join) {
  auto& of_warps = block_shared<OfWarps<T, Join>>();
  value = join_warp(value, join);
  barrier();  // behind those that still read an earlier result
  if (lane() == 0) of_warps.values[warp()] = value;
  barrier();
  return join_warp(lane() < threads() / kWarp ? of_warps.values[lane()] : none, join);
}

template <class T>
struct Plus {
  __device__ T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct Largest {
  __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

template <class T>
struct Least {
  __device__ T operator()(T a, T b) const { return a < b ? a : b; }
};

template <class T>
__device__ inline T block_sum(T value) {
  return join_block(value, T{0}, Plus<T>());
}

}  // namespace mantissa::gpu
