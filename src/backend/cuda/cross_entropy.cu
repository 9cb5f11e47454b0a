#include <limits>

#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/reduce.h"
#include "backend/cuda/values.h"
#include "backend/shared_loss.h"

namespace mantissa {
namespace {

using namespace gpu;

// e^x for x <= 0, without subnormal results. NaN stays.
__device__ inline float exponential(float x) { return x < -87.3F ? 0.0F : expf(x); }

struct RowSum {
  float largest, sum;  // of exp(logit - largest)
};

// Reads the row once: a thread corrects its sum whenever it meets a larger logit. The largest starts from a finite number, so that rows of
// -Inf give a sum of zero.
template <class T>
__device__ RowSum sum_of_row(const T* logits, int64_t columns) {
  float own = std::numeric_limits<float>::lowest(), sum = 0.0F;
  for (int64_t j = thread(); j < columns; j += kThreads) {
    const float x = value_of(logits[j]);
    if (x > own) {
      sum = sum * exponential(own - x) + 1.0F;
      own = x;
    } else {
      sum += exponential(x - own);
    }
  }
  const float largest = join_block(own, std::numeric_limits<float>::lowest(), Largest<float>());
  return {largest, block_sum(sum * exponential(own - largest))};
}

// A block has a row, in all kernels here. A target is negative where the row is ignored or it is refused. dlogits may be null or logits:
// whoever writes an element has read it.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy(const T* all_logits, CheckedIndices targets, float* loss, T* all_dlogits, int64_t vocab, int64_t columns, float scale) {
  const int64_t target = checked(targets, block());
  const T* const logits = all_logits + block() * columns;
  T* const dlogits = all_dlogits != nullptr ? all_dlogits + block() * columns : nullptr;
  if (target < 0) {
    if (thread() == 0) loss[block()] = 0.0F;
    for (int64_t j = thread(); j < columns && dlogits != nullptr; j += kThreads) dlogits[j] = rounded<T>(0.0F);
    return;
  }
  const float target_logit = value_of(logits[target]);
  const RowSum row = sum_of_row(logits, vocab);
  if (thread() == 0) loss[block()] = row.largest + logf(row.sum) - target_logit;
  for (int64_t j = thread(); j < columns && dlogits != nullptr; j += kThreads) {
    const float p = j < vocab ? exponential(value_of(logits[j]) - row.largest) / row.sum - (j == target ? 1.0F : 0.0F) : 0.0F;
    dlogits[j] = rounded<T>(j < vocab ? scale * p : 0.0F);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    share(const T* all_logits, CheckedIndices targets, float* sums, int64_t first, int64_t own, int64_t columns) {
  const int64_t target = checked(targets, block());
  const T* const logits = all_logits + block() * columns;
  const RowSum row = sum_of_row(logits, own);
  if (thread() != 0) return;
  const bool here = target >= first && target - first < own;
  sums[2 * block()] = target < 0 ? 0.0F : row.largest + logf(row.sum);
  sums[2 * block() + 1] = here ? value_of(logits[target - first]) : 0.0F;
}

struct Shares {
  const float* sums;
  int64_t ranks, rows;
  int64_t first, own, columns;  // of the logits here
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    of_shares(Shares k, const T* logits, CheckedIndices targets, float* loss, T* dlogits, float scale) {
  const int64_t target = checked(targets, block());
  const auto row = combined(k.sums, k.ranks, k.rows, block());
  if (thread() == 0) loss[block()] = target < 0 ? 0.0F : row.loss;
  for (int64_t j = thread(); j < k.columns && dlogits != nullptr; j += kThreads) {
    const int64_t at = block() * k.columns + j;
    const bool counts = j < k.own && target >= 0;
    const float p = counts ? exponential(value_of(logits[at]) - row.log_sum) - (k.first + j == target ? 1.0F : 0.0F) : 0.0F;
    dlogits[at] = rounded<T>(scale * p);
  }
}

}  // namespace

void CudaBackend::execute(const CrossEntropy& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(cross_entropy<T>, {k.logits.dim(0), kThreads}, k.logits.device_data<T>(), targets, k.loss.device_data<float>(),
           data_or_null<T>(k.dlogits), k.vocab, k.logits.dim(1), static_cast<float>(k.scale));
  });
}

void CudaBackend::execute(const CrossEntropyShare& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy_share", k.vocab));
  const int64_t columns = k.logits.dim(1);
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(share<T>, {k.logits.dim(0), kThreads}, k.logits.device_data<T>(), targets, k.sums.device_data<float>(), k.first,
           own_columns(k.first, columns, k.vocab), columns);
  });
}

void CudaBackend::execute(const CrossEntropyOfShares& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy_of_shares", k.vocab));
  const int64_t rows = k.logits.dim(0), columns = k.logits.dim(1);
  const Shares shares{.sums = k.sums.device_data<float>(),
                      .ranks = k.sums.dim(0),
                      .rows = rows,
                      .first = k.first,
                      .own = own_columns(k.first, columns, k.vocab),
                      .columns = columns};
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(of_shares<T>, {rows, kThreads}, shares, k.logits.device_data<T>(), targets, k.loss.device_data<float>(),
           data_or_null<T>(k.dlogits), static_cast<float>(k.scale));
  });
}

}  // namespace mantissa
