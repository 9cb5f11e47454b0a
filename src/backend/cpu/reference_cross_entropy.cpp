#include <algorithm>
#include <cmath>

#include "backend/cpu/indices.h"
#include "backend/cpu/reference.h"
#include "backend/cpu/scalar.h"
#include "mantissa/base/parallel.h"

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

}  // namespace

void CpuReference::execute(const CrossEntropy& k) {
  check_targets("cross_entropy", k.targets, k.vocab);
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
