// A row of CrossEntropyOfShares: the results of ranks for their columns become one. All backends combine alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "mantissa/base/host_device.h"

namespace mantissa {

// The number of columns [first, first + columns) that are in the vocabulary.
inline int64_t own_columns(int64_t first, int64_t columns, int64_t vocab) { return std::clamp<int64_t>(vocab - first, 0, columns); }

template <class S>
struct RowOfShares {
  S log_sum, loss;
};

// Combines row i of sums [R, N, 2]. The largest starts from a finite number, so that shares without columns add zeros.
template <class S>
MANTISSA_HOST_DEVICE RowOfShares<S> combined(const S* sums, int64_t ranks, int64_t rows, int64_t i) {
  S largest = std::numeric_limits<S>::lowest(), sum = 0, target_logit = 0;
  for (int64_t r = 0; r < ranks; ++r) largest = std::max(largest, sums[2 * (r * rows + i)]);
  for (int64_t r = 0; r < ranks; ++r) {
    sum += std::exp(sums[2 * (r * rows + i)] - largest);
    target_logit += sums[2 * (r * rows + i) + 1];
  }
  const S log_sum = largest + std::log(sum);
  return {log_sum, log_sum - target_logit};
}

}  // namespace mantissa
