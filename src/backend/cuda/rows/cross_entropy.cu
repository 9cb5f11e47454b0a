#include <limits>
#include <numbers>

#include "backend/cuda/checked_index.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/gemm/aligned.h"
#include "backend/shared_loss.h"

namespace mantissa {
namespace {

using namespace gpu;

// e^x for x <= 0, without subnormal results. NaN stays.
__device__ inline float exponential(float x) { return fast_exp2(x * std::numbers::log2e_v<float>); }

// A row of logits, which the threads of its block go through twice, each through packs of its own. kKept: of whole packs that begin at
// multiples of 16 bytes, and so long that the rows of all blocks would not fit into the cache: shared memory keeps it in between. Two such
// blocks share a multiprocessor of an H200.
template <class T>
struct KeptLogits {
  static constexpr int64_t kLeast = int64_t{1} << 15;  // bytes of a row

  PackInMemory<T> packs[(size_t{197} << 9) / sizeof(PackInMemory<T>)];
};
template <bool kKept, class T>
struct LogitRow {
  using Index = std::conditional_t<kKept, int, int64_t>;
  static constexpr unsigned kThreadsOfRow = kKept ? 4 * kThreads : kThreads;
  Packs<const T, kKept> logits;

  // Calls body(first, pack), the first time and then again.
  template <class Body>
  __device__ void first(Body body) const {
    for_each([&](Index first) {
      if constexpr (kKept)
        launched_shared<KeptLogits<T>>().packs[static_cast<unsigned>(first) / kPack] = load<PackInMemory<T>>(logits.values + first);
      again_at(first, body);
    });
  }
  template <class Body>
  __device__ void again(Body body) const {
    for_each([&](Index first) { again_at(first, body); });
  }

 private:
  template <class Body>
  __device__ void for_each(Body body) const {
    for (auto first = static_cast<Index>(thread() * kPack); first < static_cast<Index>(logits.count);
         first += static_cast<Index>(kThreadsOfRow * kPack))
      body(first);
  }
  template <class Body>
  __device__ void again_at(Index first, Body body) const {
    if constexpr (kKept)
      body(first, values_of(launched_shared<KeptLogits<T>>().packs[static_cast<unsigned>(first) / kPack]));
    else
      body(first, logits.read(first));
  }
};

struct RowSum {
  float largest, sum;  // sum is that of exp(logit - largest)
};

// Goes through a row of which `own` logits count: a thread corrects its sum whenever it meets a larger logit. The largest starts from a
// finite number, so that rows of -Inf give a sum of zero.
template <class Row>
__device__ RowSum sum_of_row(const Row& row, typename Row::Index own) {
  using Index = typename Row::Index;
  float largest = std::numeric_limits<float>::lowest(), sum = 0.0F;
  const auto add = [&](const Pack& pack, Index count) {
    float met = largest;
    MANTISSA_UNROLL
    for (Index i = 0; i < Index{kPack}; ++i) met = i < count ? fmaxf(pack.at[i], met) : met;
    if (met > largest) sum *= exponential(largest - met), largest = met;
    MANTISSA_UNROLL
    for (Index i = 0; i < Index{kPack}; ++i) sum += i < count ? exponential(pack.at[i] - largest) : 0.0F;
  };
  row.first([&](Index first, const Pack& pack) {
    if (first + Index{kPack} <= own)
      add(pack, kPack);
    else
      add(pack, own - first);
  });
  const float of_all = join_block(largest, std::numeric_limits<float>::lowest(), Largest<float>());
  return {of_all, block_sum(sum * exponential(largest - of_all))};
}

// Logits of this block's row and of its gradient, which may be null or the logits: whoever writes an element has read it.
template <class T>
struct LogitRows {
  const T* logits;
  T* dlogits;
  int64_t columns, first, own;  // columns from `first` on of the whole, of which `own` are in the vocabulary
  bool aligned;
  CheckedIndices targets;

  __device__ const T* row() const { return logits + block() * columns; }
  __device__ Packs<const T> packs() const { return {row(), columns, aligned}; }
  __device__ Packs<T> gradients() const { return {dlogits + block() * columns, columns, aligned}; }
};

// Writes the gradients of a row's logits, of which `own` are in the vocabulary and the others get zeros: scale * (p - 1 at the target), p
// being exp(logit - subtracted) * factor.
template <class Row, class T>
__device__ void write_gradients(const LogitRows<T>& k, const Row& row, float subtracted, float factor, typename Row::Index own,
                                typename Row::Index target, float scale) {
  using Index = typename Row::Index;
  const Packs<T> dlogits = k.gradients();
  const float scaled = factor * scale;
  row.again([&](Index first, Pack pack) {
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) pack.at[i] = exponential(pack.at[i] - subtracted) * scaled;
    const Index at = target - first, left = own - first;
    if (at >= 0 && at < Index{kPack}) {
      MANTISSA_UNROLL
      for (Index i = 0; i < Index{kPack}; ++i) pack.at[i] -= i == at ? scale : 0.0F;
    }
    if (left < Index{kPack}) {
      MANTISSA_UNROLL
      for (Index i = 0; i < Index{kPack}; ++i) pack.at[i] = i < left ? pack.at[i] : 0.0F;
    }
    dlogits.write(first, pack);
  });
}

// A block has a row, in all kernels here. A target is negative where the row is ignored or it is refused.
template <bool kKept, class T>
__global__ void __launch_bounds__(LogitRow<kKept, T>::kThreadsOfRow, kKept ? 2 : 6)
    cross_entropy(LogitRows<T> k, float* loss, float scale) {
  using Row = LogitRow<kKept, T>;
  const int64_t target = checked(k.targets, block());
  if (target < 0) {
    if (thread() == 0) loss[block()] = 0.0F;
    for (int64_t first = thread() * kPack; k.dlogits != nullptr && first < k.columns; first += Row::kThreadsOfRow * kPack)
      k.gradients().write(first, Pack{});
    return;
  }
  const float target_logit = value_of(k.row()[target]);
  const Row row{{k.row(), k.columns, k.aligned}};
  const RowSum sum = sum_of_row(row, static_cast<typename Row::Index>(k.own));
  if (thread() == 0) loss[block()] = sum.largest + logf(sum.sum) - target_logit;
  if (k.dlogits != nullptr)
    write_gradients(k, row, sum.largest, 1.0F / sum.sum, static_cast<typename Row::Index>(k.own), static_cast<typename Row::Index>(target),
                    scale);
}

template <class T>
__global__ void __launch_bounds__(kThreads) share(LogitRows<T> k, float* sums) {
  const int64_t target = checked(k.targets, block());
  const RowSum row = sum_of_row(LogitRow<false, T>{k.packs()}, k.own);
  if (thread() != 0) return;
  const bool here = target >= k.first && target - k.first < k.own;
  sums[2 * block()] = target < 0 ? 0.0F : row.largest + logf(row.sum);
  sums[2 * block() + 1] = here ? value_of(k.row()[target - k.first]) : 0.0F;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    of_shares(LogitRows<T> k, const float* sums, int64_t ranks, int64_t rows, float* loss, float scale) {
  const int64_t target = checked(k.targets, block());
  const auto row = combined(sums, ranks, rows, block());
  if (thread() == 0) loss[block()] = target < 0 ? 0.0F : row.loss;
  if (k.dlogits != nullptr)
    write_gradients(k, LogitRow<false, T>{k.packs()}, row.log_sum, 1.0F, target < 0 ? 0 : k.own, target - k.first, scale);
}

// The teacher's logits of this block's row, beside those of the student.
template <class T>
struct TaughtRows {
  LogitRows<T> student;
  const T* teacher;

  __device__ Packs<const T> teacher_row(int64_t count) const { return {teacher + block() * student.columns, count, student.aligned}; }
};

// Goes through the columns of both rows that are in the vocabulary.
template <class T, class Body>
__device__ void for_each_pair(const TaughtRows<T>& k, Body body) {
  const Packs<const T> logits{k.student.row(), k.student.own, k.student.aligned}, teacher = k.teacher_row(k.student.own);
  for_each_pack_of_row<OfBlock>(logits.count, [&](int64_t first) {
    const Pack s = logits.read(first), t = teacher.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      if (first + i < logits.count) body(s.at[i], t.at[i]);
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) distillation_share(TaughtRows<T> k, float* sums, float factor) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const int64_t target = checked(k.student.targets, block());
  float largest = kLowest, of_teacher = kLowest;
  for_each_pair(k, [&](float s, float t) {
    largest = s > largest ? s : largest;
    of_teacher = t > of_teacher ? t : of_teacher;
  });
  largest = join_block(largest, kLowest, Largest<float>());
  of_teacher = join_block(of_teacher, kLowest, Largest<float>());
  const float subtracted = largest * factor, from_teacher = of_teacher * factor;
  float sum = 0.0F, teacher_sum = 0.0F, label_sum = 0.0F, cross = 0.0F;
  for_each_pair(k, [&](float s, float t) {
    const float p = exponential(t * factor - from_teacher);
    sum += exponential(s * factor - subtracted);
    teacher_sum += p;
    if (factor != 1.0F) label_sum += exponential(s - largest);
    cross += p * (t - s);
  });
  sum = block_sum(sum), teacher_sum = block_sum(teacher_sum), label_sum = block_sum(label_sum), cross = block_sum(cross);
  if (thread() != 0) return;
  const bool here = target >= k.student.first && target - k.student.first < k.student.own;
  float* const out = sums + block() * DistillationShare::kSums;
  out[0] = target < 0 ? 0.0F : subtracted + logf(sum);
  out[1] = target < 0 ? 0.0F : from_teacher + logf(teacher_sum);
  out[2] = target < 0 || k.student.own == 0 ? 0.0F : cross * factor / teacher_sum;
  out[3] = target < 0 ? 0.0F : factor != 1.0F ? largest + logf(label_sum) : out[0];
  out[4] = here ? value_of(k.student.row()[target - k.student.first]) : 0.0F;
}

template <class T>
__global__ void __launch_bounds__(kThreads) distillation_of_shares(TaughtRows<T> k, const float* sums, int64_t ranks, int64_t rows,
                                                                   float* loss, DistillationFactors<float> factors) {
  const int64_t target = checked(k.student.targets, block()), column = target - k.student.first, own = target < 0 ? 0 : k.student.own;
  const auto row = distilled(sums, ranks, rows, block(), factors);
  if (thread() == 0) loss[block()] = target < 0 ? 0.0F : row.loss;
  if (k.student.dlogits == nullptr) return;
  const Packs<const T> logits = k.student.packs(), teacher = k.teacher_row(k.student.columns);
  const Packs<T> gradients = k.student.gradients();
  const float factor = factors.per_temperature;
  for_each_pack_of_row<OfBlock>(logits.count, [&](int64_t first) {
    Pack pack = logits.read(first);
    const Pack taught = teacher.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) {
      const int64_t j = first + i;
      const float s = pack.at[i], q = exponential(s * factor - row.log_sum);
      float gradient = factors.gradient_of_divergence * (q - exponential(taught.at[i] * factor - row.teacher_log_sum));
      if (factors.labels > 0.0F)
        gradient += factors.gradient_of_labels * (exponential(s - row.label_log_sum) - (j == column ? 1.0F : 0.0F));
      if (j >= own) gradient = 0.0F;
      pack.at[i] = gradient;
    }
    gradients.write(first, pack);
  });
}

template <class T>
LogitRows<T> rows_of(const Tensor& logits, const Tensor& dlogits, int64_t first, int64_t vocab, const CheckedIndices& targets) {
  const T* const x = logits.device_data<T>();
  T* const dx = data_or_null<T>(dlogits);
  const int64_t columns = logits.dim(1);
  return {x, dx, columns, first, own_columns(first, columns, vocab), begin_at_packs(columns, x, dx), targets};
}

template <class T, class Kernel>
TaughtRows<T> taught_rows_of(const Kernel& k, const Tensor& dlogits, const CheckedIndices& targets) {
  LogitRows<T> student = rows_of<T>(k.logits, dlogits, k.first, k.vocab, targets);
  const T* const teacher = k.teacher.template device_data<T>();
  student.aligned = student.aligned && begin_at_packs(student.columns, teacher);
  return {student, teacher};
}

}  // namespace

void CudaBackend::execute(const CrossEntropy& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    const int64_t rows = k.logits.dim(0), columns = k.logits.dim(1), bytes = columns * static_cast<int64_t>(sizeof(T));
    const auto run = [&](auto kernel, Grid grid, const Tensor& logits, const Tensor& dlogits) {
      launch(kernel, grid, rows_of<T>(logits, dlogits, 0, k.vocab, targets), k.loss.device_data<float>(), static_cast<float>(k.scale));
    };
    using Kept = KeptLogits<T>;
    if (columns % kPack != 0 || bytes < Kept::kLeast || bytes > static_cast<int64_t>(sizeof(Kept)))
      return run(cross_entropy<false, T>, {rows, kThreads}, k.logits, k.dlogits);
    const Tensor logits = aligned(*this, k.logits),
                 dlogits = k.dlogits.defined() ? aligned(*this, k.dlogits, Contents::overwritten) : k.dlogits;
    run(cross_entropy<true, T>, {rows, LogitRow<true, T>::kThreadsOfRow, sizeof(Kept)}, logits, dlogits);
    if (dlogits.defined()) copy_back(*this, dlogits, k.dlogits);
  });
}

void CudaBackend::execute(const CrossEntropyShare& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy_share", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(share<T>, {k.logits.dim(0), kThreads}, rows_of<T>(k.logits, {}, k.first, k.vocab, targets), k.sums.device_data<float>());
  });
}

void CudaBackend::execute(const CrossEntropyOfShares& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("cross_entropy_of_shares", k.vocab));
  const int64_t rows = k.logits.dim(0);
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(of_shares<T>, {rows, kThreads}, rows_of<T>(k.logits, k.dlogits, k.first, k.vocab, targets), k.sums.device_data<float>(),
           k.sums.dim(0), rows, k.loss.device_data<float>(), static_cast<float>(k.scale));
  });
}

void CudaBackend::execute(const DistillationShare& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("distillation_share", k.vocab));
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(distillation_share<T>, {k.logits.dim(0), kThreads}, taught_rows_of<T>(k, {}, targets), k.sums.device_data<float>(),
           static_cast<float>(1.0 / k.temperature));
  });
}

void CudaBackend::execute(const DistillationOfShares& k) {
  const CheckedIndices targets = checked(k.targets, IndexRule::targets("distillation_of_shares", k.vocab));
  const int64_t rows = k.logits.dim(0);
  with_values(k.logits.dtype(), [&]<class T>() {
    launch(distillation_of_shares<T>, {rows, kThreads}, taught_rows_of<T>(k, k.dlogits, targets), k.sums.device_data<float>(),
           k.sums.dim(0), rows, k.loss.device_data<float>(), DistillationFactors<float>(k.temperature, k.weight, k.scale));
  });
}

}  // namespace mantissa
