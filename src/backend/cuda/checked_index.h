// Indices of kernels that a host may have given wrong, and groups of rows whose offsets only the device knows.
#pragma once

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/reduce.h"

namespace mantissa::gpu {

// Returns whether the rule allows value number `index`. A kernel must not use one that it refuses.
__device__ inline bool allowed(ErrorWord* error, const IndexRule& rule, int64_t index, int64_t value) {
  if (rule.allows(value)) return true;
  if (fetch_or(&error->taken, 1U) == 0) {
    error->value = value;
    error->index = index;
    error->rule = rule;
  }
  return false;
}

// Returns value number i, or -1 where it is refused.
__device__ inline int64_t checked(const CheckedIndices& of, int64_t i) {
  return allowed(of.error, of.rule, i, of.values[i]) ? of.values[i] : -1;
}

// Returns the first i in [0, count) for which bad(i), or count; a CPU would report the same i. All threads of the block call it, and get
// the same.
template <class Bad>
__device__ inline int64_t first_bad(int64_t count, Bad bad) {
  int64_t i = thread();
  while (i < count && !bad(i)) i += threads();
  return join_block(i < count ? i : count, count, Least<int64_t>());
}

// Groups by their checked_offsets().
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
