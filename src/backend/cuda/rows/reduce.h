// Sums and maxima over the threads of a warp or of a block, in an order that depends on the number of threads alone; and sums in the order
// of the elements.
#pragma once

#include "backend/cuda/values.h"

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

inline constexpr int64_t kAddedAtOnce = 1024, kAhead = 16;

struct Addends {
  double values[kAddedAtOnce];
};

// Sums in fp64, in the order of the elements: the block loads, and one of its threads adds. Returns the sum in thread 0; others get a
// number without meaning. All threads of the block call it.
template <class T>
__device__ inline double sum_in_order(const T* x, int64_t count) {
  auto& addends = block_shared<Addends>();
  double sum = 0.0;
  for (int64_t first = 0; first < count; first += kAddedAtOnce) {
    const int64_t loaded = count - first < kAddedAtOnce ? count - first : kAddedAtOnce;
    barrier();  // behind those that still read addends
    for (int64_t i = thread(); i < loaded; i += kThreads) addends.values[i] = static_cast<double>(x[first + i]);
    barrier();
    if (thread() != 0) continue;
    int64_t i = 0;
    for (; i + kAhead <= loaded; i += kAhead) {  // a sum waits for the one before, but not for its addend
      double ahead[kAhead];
      MANTISSA_UNROLL
      for (int64_t j = 0; j < kAhead; ++j) ahead[j] = addends.values[i + j];
      MANTISSA_UNROLL
      for (int64_t j = 0; j < kAhead; ++j) sum += ahead[j];
    }
    for (; i < loaded; ++i) sum += addends.values[i];
  }
  return sum;
}

}  // namespace mantissa::gpu
