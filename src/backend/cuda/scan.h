// Sums of all elements before each.
#pragma once

#include "backend/cuda/values.h"

namespace mantissa::gpu {

struct SumsOfWarps {
  int64_t values[kThreads / kWarp];
};

// Calls put(i, value(0) + .. + value(i - 1)) for i in [0, count]. All threads of a block call it, each for its own i.
template <class Value, class Put>
__device__ inline void scan_in_block(int64_t count, Value value, Put put) {
  auto& of_warps = block_shared<SumsOfWarps>().values;
  int64_t before = 0;  // sum of all that earlier rounds had
  for (int64_t first = 0; first <= count; first += kThreads) {
    const int64_t i = first + thread(), own = i < count ? value(i) : 0;
    int64_t sum = own;
    for (unsigned by = 1; by < kWarp; by *= 2) {
      const int64_t earlier = shuffle(sum, lane() >= by ? lane() - by : lane());
      if (lane() >= by) sum += earlier;
    }
    barrier();  // behind those that still read an earlier round
    if (lane() == kWarp - 1) of_warps[warp()] = sum;
    barrier();
    int64_t all = before;
    for (unsigned w = 0; w < kThreads / kWarp; ++w) {
      if (w < warp()) before += of_warps[w];
      all += of_warps[w];
    }
    if (i <= count) put(i, before + sum - own);
    before = all;
  }
}

}  // namespace mantissa::gpu
