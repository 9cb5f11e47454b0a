// Sums in the order of the elements, in fp64: a block loads, and one of its threads adds.
#pragma once

#include "backend/cuda/values.h"

namespace mantissa::gpu {

inline constexpr int64_t kAddedAtOnce = 1024;

struct Addends {
  double values[kAddedAtOnce];
};

// Returns the sum in thread 0; others get a number without meaning. All threads of the block call it.
template <class T>
__device__ inline double sum_in_order(const T* x, int64_t count) {
  auto& addends = block_shared<Addends>();
  double sum = 0.0;
  for (int64_t first = 0; first < count; first += kAddedAtOnce) {
    const int64_t loaded = count - first < kAddedAtOnce ? count - first : kAddedAtOnce;
    barrier();  // behind those that still read
    for (int64_t i = thread(); i < loaded; i += kThreads) addends.values[i] = static_cast<double>(x[first + i]);
    barrier();
    for (int64_t i = 0; i < loaded && thread() == 0; ++i) sum += addends.values[i];
  }
  return sum;
}

}  // namespace mantissa::gpu
