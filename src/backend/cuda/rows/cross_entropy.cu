#include <limits>
#include <numbers>

#include "backend/cuda/checked_index.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/shared_loss.h"

namespace mantissa {
namespace {

using namespace gpu;

// e^x for x <= 0, without subnormal results. NaN stays.
__device__ inline float exponential(float x) { return fast_exp2(x * std::numbers::log2e_v<float>); }

struct RowSum {
  float largest, sum;  // sum is that of exp(logit - largest)
};

// Reads the row once: a thread corrects its sum whenever it meets a larger logit. The largest starts from a finite number, so that rows of
// -Inf give a sum of zero.
template <class T>
__device__ RowSum sum_of_row(const Packs<const T>& logits) {
  float own = std::numeric_limits<float>::lowest(), sum = 0.0F;
  for_each_pack_of_row<OfBlock>(logits.count, [&](int64_t first) {
    const Pack pack = logits.read(first);
    float largest = own;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) largest = first + i < logits.count && pack.at[i] > largest ? pack.at[i] : largest;
    if (largest > own) sum *= exponential(own - largest), own = largest;
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) sum += first + i < logits.count ? exponential(pack.at[i] - own) : 0.0F;
  });
  const float largest = join_block(own, std::numeric_limits<float>::lowest(), Largest<float>());
  return {largest, block_sum(sum * exponential(own - largest))};
}

// Gradients of the logits of a row, of which `own` are in the vocabulary and the others get zeros: scale * (p - 1 at the target), p being
// exp(logit - subtracted) * factor.
struct Probability {
  float subtracted, factor;
};
template <class T>
__device__ void write_gradients(const Packs<const T>& logits, const Packs<T>& dlogits, Probability p, int64_t own, int64_t target,
                                float scale) {
  for_each_pack_of_row<OfBlock>(logits.count, [&](int64_t first) {
    Pack pack = logits.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const int64_t j = first + i;
      const float difference = exponential(pack.at[i] - p.subtracted) * p.factor - (j == target ? 1.0F : 0.0F);
      pack.at[i] = j < own ? scale * difference : 0.0F;
    }
    dlogits.write(first, pack);
  });
}

// Logits of this block's row and of its gradient, which may be null or the logits: whoever writes an element has read it.
template <class T>
struct LogitRows {
  const T* logits;
  T* dlogits;
  int64_t columns;
  bool aligned;

  __device__ Packs<const T> own(int64_t count) const { return {logits + block() * columns, count, aligned}; }
  __device__ Packs<const T> all() const { return own(columns); }
  __device__ Packs<T> gradients() const { return {dlogits + block() * columns, columns, aligned}; }
};

// A block has a row, in all kernels here. A target is negative where the row is ignored or it is refused.
template <class T>
__global__ void __launch_bounds__(kThreads) cross_entropy(LogitRows<T> k, CheckedIndices targets, float* loss, int64_t vocab, float scale) {
  const int64_t target = checked(targets, block());
  if (target < 0) {
    if (thread() == 0) loss[block()] = 0.0F;
    if (k.dlogits != nullptr) for_each_pack_of_row<OfBlock>(k.columns, [&](int64_t first) { k.gradients().write(first, Pack{}); });
    return;
  }
  const float target_logit = value_of(k.all().values[target]);
  const RowSum row = sum_of_row(k.own(vocab));
  if (thread() == 0) loss[block()] = row.largest + logf(row.sum) - target_logit;
  if (k.dlogits != nullptr) write_gradients(k.all(), k.gradients(), {row.largest, 1.0F / row.sum}, vocab, target, scale);
}

template <class T>
__global__ void __launch_bounds__(kThreads) share(LogitRows<T> k, CheckedIndices targets, float* sums, int64_t first, int64_t own) {
  const int64_t target = checked(targets, block());
  const RowSum row = sum_of_row(k.own(own));
  if (thread() != 0) return;
  const bool here = target >= first && target - first < own;
  sums[2 * block()] = target < 0 ? 0.0F : row.largest + logf(row.sum);
  sums[2 * block() + 1] = here ? value_of(k.all().values[target - first]) : 0.0F;
}

struct Shares {
  const float* sums;
  int64_t ranks, rows;
  int64_t first, own;  // columns of the logits here
};

template <class T>
__global__ void __launch_bounds__(kThreads) of_shares(Shares k, LogitRows<T> rows, CheckedIndices targets, float* loss, float scale) {
  const int64_t target = checked(targets, block());
  const auto row = combined(k.sums, k.ranks, k.rows, block());
  if (thread() == 0) loss[block()] = target < 0 ? 0.0F : row.loss;
  if (rows.dlogits != nullptr)
    write_gradients(rows.all(), rows.gradients(), {row.log_sum, 1.0F}, target < 0 ? 0 : k.own, target - k.first, scale);
}

template <class T>
LogitRows<T> rows_of(const Tensor& logits, const Tensor& dlogits) {
  const T* const x = logits.device_data<T>();
  T* const dx = data_or_null<T>(dlogits);
  return {x, dx, logits.dim(1), begin_at_packs(logits.dim(1), x, dx)};
}

}  // namespace

void CudaBackend::execute(const CrossEntropy& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(cross_entropy<T>, {k.logits.dim(0), kThreads}, rows_of<T>(k.logits, k.dlogits), targets, k.loss.device_data<float>(), k.vocab,
           static_cast<float>(k.scale));
  });
}

void CudaBackend::execute(const CrossEntropyShare& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy_share", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(share<T>, {k.logits.dim(0), kThreads}, rows_of<T>(k.logits, {}), targets, k.sums.device_data<float>(), k.first,
           own_columns(k.first, k.logits.dim(1), k.vocab));
  });
}

void CudaBackend::execute(const CrossEntropyOfShares& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy_of_shares", k.vocab));
  const int64_t rows = k.logits.dim(0);
  const Shares shares{.sums = k.sums.device_data<float>(),
                      .ranks = k.sums.dim(0),
                      .rows = rows,
                      .first = k.first,
                      .own = own_columns(k.first, k.logits.dim(1), k.vocab)};
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(of_shares<T>, {rows, kThreads}, shares, rows_of<T>(k.logits, k.dlogits), targets, k.loss.device_data<float>(),
           static_cast<float>(k.scale));
  });
}

}  // namespace mantissa
