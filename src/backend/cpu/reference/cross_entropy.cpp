#include <algorithm>
#include <cmath>
#include <limits>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "backend/shared_loss.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

// dlogits may be logits: an element is read for the last time just before it is written.
template <class T>
Arithmetic<T> row_loss(const T* logits, T* dlogits, int64_t target, int64_t vocab, int64_t columns, double scale) {
  using S = Arithmetic<T>;
  if (target < 0) {
    if (dlogits != nullptr) std::fill_n(dlogits, columns, store<T>(S{0}));
    return 0;
  }
  S largest = load(logits[0]), sum = 0;
  for (int64_t j = 1; j < vocab; ++j) largest = std::max(largest, load(logits[j]));
  for (int64_t j = 0; j < vocab; ++j) sum += std::exp(load(logits[j]) - largest);
  const S log_sum = largest + std::log(sum), loss = log_sum - load(logits[target]);
  if (dlogits == nullptr) return loss;
  for (int64_t j = 0; j < vocab; ++j) {
    const S p = std::exp(load(logits[j]) - largest) / sum;
    dlogits[j] = store<T>(static_cast<S>(scale) * (p - static_cast<S>(j == target)));
  }
  std::fill(dlogits + vocab, dlogits + columns, store<T>(S{0}));
  return loss;
}

// Returns log-sum-exp; -Inf where all logits are.
template <class T>
Arithmetic<T> log_sum_of(const T* logits, int64_t columns) {
  using S = Arithmetic<T>;
  S largest = std::numeric_limits<S>::lowest(), sum = 0;
  for (int64_t j = 0; j < columns; ++j) largest = std::max(largest, load(logits[j]));
  for (int64_t j = 0; j < columns; ++j) sum += std::exp(load(logits[j]) - largest);
  return largest + std::log(sum);
}

}  // namespace

void CpuReference::execute(const CrossEntropyShare& k) {
  check_indices(k.targets, IndexRule::targets("cross_entropy_share", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
    const int32_t* targets = k.targets.device_data<int32_t>();
    S* sums = k.sums.device_data<S>();
    for (int64_t i = 0; i < k.logits.dim(0); ++i) {
      const T* logits = k.logits.device_data<T>() + i * columns;
      const int64_t target = targets[i] - k.first;
      sums[2 * i] = targets[i] < 0 ? S{0} : log_sum_of(logits, own);
      sums[2 * i + 1] = targets[i] >= 0 && target >= 0 && target < own ? load(logits[target]) : S{0};
    }
  });
}

void CpuReference::execute(const CrossEntropyOfShares& k) {
  check_indices(k.targets, IndexRule::targets("cross_entropy_of_shares", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
    const int32_t* targets = k.targets.device_data<int32_t>();
    for (int64_t i = 0; i < k.logits.dim(0); ++i) {
      const auto row = combined(k.sums.device_data<S>(), k.sums.dim(0), k.logits.dim(0), i);
      k.loss.device_data<S>()[i] = targets[i] < 0 ? S{0} : row.loss;
      if (!k.dlogits.defined()) continue;
      const T* logits = k.logits.device_data<T>() + i * columns;
      T* dlogits = k.dlogits.device_data<T>() + i * columns;
      for (int64_t j = 0; j < columns; ++j) {
        const S p = j < own && targets[i] >= 0 ? std::exp(load(logits[j]) - row.log_sum) - static_cast<S>(k.first + j == targets[i]) : S{0};
        dlogits[j] = store<T>(static_cast<S>(k.scale) * p);
      }
    }
  });
}

void CpuReference::execute(const CrossEntropy& k) {
  check_indices(k.targets, IndexRule::targets("cross_entropy", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    const int64_t columns = k.logits.dim(1);
    const T* logits = k.logits.device_data<T>();
    T* dlogits = k.dlogits.defined() ? k.dlogits.device_data<T>() : nullptr;
    auto* loss = k.loss.device_data<Arithmetic<T>>();
    const int32_t* targets = k.targets.device_data<int32_t>();
    parallel_for(k.logits.dim(0), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* gradient = dlogits == nullptr ? nullptr : dlogits + i * columns;
        loss[i] = row_loss<T>(logits + i * columns, gradient, targets[i], k.vocab, columns, k.scale);
      }
    });
  });
}

}  // namespace mantissa
