// Rows of CrossEntropyOfShares and DistillationOfShares: the results of ranks for their columns become one. All backends combine alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "mantissa/backend/backend.h"
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

// The loss of a row of DistillationOfShares, and what its gradient subtracts in exponents.
template <class S>
struct DistilledRow {
  S log_sum, teacher_log_sum, label_log_sum, loss;  // the first two are those of logits / temperature
};

// Factors of a row's loss and of its gradient.
template <class S>
struct DistillationFactors {
  S per_temperature;  // 1 / temperature
  S divergence, labels;
  S gradient_of_divergence, gradient_of_labels;

  DistillationFactors(double temperature, double weight, double scale)
      : per_temperature(static_cast<S>(1.0 / temperature)),
        divergence(static_cast<S>(weight * temperature * temperature)),
        labels(static_cast<S>(1.0 - weight)),
        gradient_of_divergence(static_cast<S>(scale * weight * temperature)),
        gradient_of_labels(static_cast<S>(scale * (1.0 - weight))) {}
};

// Combines row i of sums [R, N, 5]. Shares without columns add zeros, as in combined().
template <class S>
MANTISSA_HOST_DEVICE DistilledRow<S> distilled(const S* sums, int64_t ranks, int64_t rows, int64_t i,
                                               const DistillationFactors<S>& factors) {
  constexpr int64_t kSums = DistillationShare::kSums;
  const auto at = [=](int64_t rank, int64_t which) { return sums[kSums * (rank * rows + i) + which]; };
  const auto log_sum_of = [=](int64_t which) {
    S largest = std::numeric_limits<S>::lowest(), sum = 0;
    for (int64_t r = 0; r < ranks; ++r) largest = std::max(largest, at(r, which));
    for (int64_t r = 0; r < ranks; ++r) sum += std::exp(at(r, which) - largest);
    return largest + std::log(sum);
  };
  DistilledRow<S> row{log_sum_of(0), log_sum_of(1), log_sum_of(3), S{0}};
  S cross = 0, target_logit = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    cross += std::exp(at(r, 1) - row.teacher_log_sum) * at(r, 2);
    target_logit += at(r, 4);
  }
  row.loss = factors.divergence * (cross + (row.log_sum - row.teacher_log_sum));
  if (factors.labels > 0) row.loss += factors.labels * (row.label_log_sum - target_logit);
  return row;
}

}  // namespace mantissa
