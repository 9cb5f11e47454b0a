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

// The sum of exp(x * factor - largest).
template <class S>
struct SumOfExponentials {
  S largest = std::numeric_limits<S>::lowest(), sum = 0;
  S log() const { return largest + std::log(sum); }  // -Inf where all of x is
};

template <class T>
SumOfExponentials<Arithmetic<T>> sum_of_exponentials(const T* x, int64_t columns, Arithmetic<T> factor = 1) {
  SumOfExponentials<Arithmetic<T>> out;
  for (int64_t j = 0; j < columns; ++j) out.largest = std::max(out.largest, load(x[j]) * factor);
  for (int64_t j = 0; j < columns; ++j) out.sum += std::exp(load(x[j]) * factor - out.largest);
  return out;
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
      sums[2 * i] = targets[i] < 0 ? S{0} : sum_of_exponentials(logits, own).log();
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

void CpuReference::execute(const DistillationShare& k) {
  check_indices(k.targets, IndexRule::targets("distillation_share", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
    const int32_t* targets = k.targets.device_data<int32_t>();
    const S factor = static_cast<S>(1.0 / k.temperature);
    for (int64_t i = 0; i < k.logits.dim(0); ++i) {
      S* sums = k.sums.device_data<S>() + i * DistillationShare::kSums;
      std::fill_n(sums, DistillationShare::kSums, S{0});
      if (targets[i] < 0) continue;
      const T *logits = k.logits.device_data<T>() + i * columns, *teacher = k.teacher.device_data<T>() + i * columns;
      const int64_t target = targets[i] - k.first;
      const auto taught = sum_of_exponentials(teacher, own, factor);
      sums[0] = sum_of_exponentials(logits, own, factor).log();
      sums[1] = taught.log();
      for (int64_t j = 0; j < own; ++j) {
        const S p = std::exp(load(teacher[j]) * factor - taught.largest) / taught.sum;
        sums[2] += p * (load(teacher[j]) - load(logits[j])) * factor;
      }
      sums[3] = sum_of_exponentials(logits, own).log();
      if (target >= 0 && target < own) sums[4] = load(logits[target]);
    }
  });
}

void CpuReference::execute(const DistillationOfShares& k) {
  check_indices(k.targets, IndexRule::targets("distillation_of_shares", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t rows = k.logits.dim(0), columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
    const int32_t* targets = k.targets.device_data<int32_t>();
    const DistillationFactors<S> factors(k.temperature, k.weight, k.scale);
    for (int64_t i = 0; i < rows; ++i) {
      const auto row = distilled(k.sums.device_data<S>(), k.sums.dim(0), rows, i, factors);
      k.loss.device_data<S>()[i] = targets[i] < 0 ? S{0} : row.loss;
      if (!k.dlogits.defined()) continue;
      const T *logits = k.logits.device_data<T>() + i * columns, *teacher = k.teacher.device_data<T>() + i * columns;
      T* dlogits = k.dlogits.device_data<T>() + i * columns;
      for (int64_t j = 0; j < columns; ++j) {
        S gradient = 0;
        if (j < own && targets[i] >= 0) {
          const S p = std::exp(load(teacher[j]) * factors.per_temperature - row.teacher_log_sum);
          const S q = std::exp(load(logits[j]) * factors.per_temperature - row.log_sum);
          gradient = factors.gradient_of_divergence * (q - p);
          if (k.weight < 1.0) {
            const S of_label = std::exp(load(logits[j]) - row.label_log_sum) - static_cast<S>(k.first + j == targets[i]);
            gradient += factors.gradient_of_labels * of_label;
          }
        }
        dlogits[j] = store<T>(gradient);
      }
    }
  });
}

}  // namespace mantissa
