// Groups of rows whose offsets only the device knows.
#pragma once

#include "backend/cuda/values.h"

namespace mantissa::gpu {

struct GroupOffsets {
  const int32_t* offsets;
  int64_t count;

  __device__ int64_t begin(int64_t group) const { return offsets[group]; }
  __device__ int64_t end(int64_t group) const { return offsets[group + 1]; }
  __device__ int64_t end() const { return offsets[count]; }  // number of rows that belong to a group

  // The last group g with key(g) <= at, of keys that never descend; key(0) <= at.
  template <class Key>
  __device__ int64_t last(int64_t at, Key key) const {
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (key(middle) <= at ? low : high) = middle;
    }
    return low;
  }
  // The group of a row; -1: none.
  __device__ int64_t of(int64_t row) const {
    return row < end() ? last(row, [this](int64_t g) { return begin(g); }) : -1;
  }
};

inline GroupOffsets groups_of(const Tensor& offsets) { return {offsets.device_data<int32_t>(), offsets.elements() - 1}; }

}  // namespace mantissa::gpu
