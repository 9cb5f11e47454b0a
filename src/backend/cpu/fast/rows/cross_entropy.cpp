#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "backend/shared_loss.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats, simd::Slots;

// A row is read from memory once: block by block, its exponentials against the largest logit so far are added up, and the second pass over
// the cached row corrects each block by exp(its reference - the largest). So the memory is busy while the exponentials are computed. Those
// of fp32 are kept in dlogits; those of bf16 are computed again, which takes less time than to write twice the row into the second level of
// the cache and to read it back.
constexpr int64_t kBlock = 512;

struct RowSums {
  float largest = std::numeric_limits<float>::lowest();  // finite, so that a block of -Inf gives zeros
  float sum = 0.0F;                                      // sum of exp(logit - largest)
};

[[gnu::always_inline]] inline float largest_of(const float* logits, int64_t n, float start) {
  Slots largest;
  for (Floats& slot : largest.slot) slot = simd::broadcast(start);
  simd::for_values(
      logits, n, start, [&](Floats x, int slot) __attribute__((always_inline)) { largest.slot[slot] = simd::max(x, largest.slot[slot]); });
  const Floats all = simd::max(simd::max(largest.slot[0], largest.slot[1]), simd::max(largest.slot[2], largest.slot[3]));
  float result = start;
  for (int i = 0; i < simd::kLanes; ++i) result = all[i] > result ? all[i] : result;
  return result;
}

// Compares integers that are ordered like the elements. If one is NaN, any result will do: everything of that row becomes NaN.
[[gnu::always_inline]] inline float largest_of(const bf16* logits, int64_t n, float start) {
  const auto turned = [](int16_t key) __attribute__((always_inline)) { return static_cast<int16_t>(key ^ ((key >> 15) & 0x7FFF)); };
  int16_t largest = std::numeric_limits<int16_t>::min();
  for (int64_t j = 0; j < n; ++j) {
    const int16_t key = turned(static_cast<int16_t>(logits[j].bits));
    largest = key > largest ? key : largest;
  }
  const float value = lane::load(bf16{static_cast<uint16_t>(turned(largest))});
  if (value > start) [[unlikely]]  // predicted, so that nothing waits for the search
    return value;
  return start;
}

// exponentials = e^(logits - largest), in two steps as in activation.cpp. Both may be the same memory: no element is read after another was
// written in its place.
[[gnu::always_inline]] inline void exponents_of(const float* logits, float largest, float* exponents, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) exponents[j] = lane::exponent_negative(logits[j] - largest);
}
// Writes the exponents of the lower halves of words, then of the upper halves, then of a last element.
[[gnu::always_inline]] inline void exponents_of(const bf16* logits, float largest, float* __restrict exponents, int64_t n) {
  const int64_t half = n / 2;
  for (int64_t j = 0; j < half; ++j) {
    const uint32_t word = lane::words(logits)[j];
    exponents[j] = lane::exponent_negative(lane::low(word) - largest);
    exponents[half + j] = lane::exponent_negative(lane::high(word) - largest);
  }
  if (n % 2 != 0) exponents[n - 1] = lane::exponent_negative(lane::load(logits[n - 1]) - largest);
}
template <class T>
[[gnu::always_inline]] inline void exponentials_of(const T* logits, float largest, float* exponentials, int64_t n) {
  exponents_of(logits, largest, exponentials, n);
  for (int64_t j = 0; j < n; ++j) exponentials[j] = lane::exp2_inside<float>(exponentials[j]);
}

[[gnu::always_inline]] inline float sum_of(const float* x, int64_t n) {
  Slots total;
  simd::for_values(
      x, n, 0.0F, [&](Floats value, int slot) __attribute__((always_inline)) { total.slot[slot] += value; });
  return simd::sum(total);
}

// Adds a block to the sums and leaves its exponentials relative to sums.largest. exponentials may be logits.
template <class T>
[[gnu::always_inline]] inline void add_block(const T* logits, int64_t n, RowSums& sums, float* exponentials) {
  const float largest = largest_of(logits, n, sums.largest);
  exponentials_of(logits, largest, exponentials, n);
  if (largest > sums.largest) sums.sum *= std::exp(sums.largest - largest);
  sums.sum += sum_of(exponentials, n);
  sums.largest = largest;
}

// dlogits = exponentials * factor, in the order of exponentials_of. Both may be the same memory.
[[gnu::always_inline]] inline void scale_block(const float* exponentials, float factor, float* dlogits, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) dlogits[j] = exponentials[j] * factor;
}
[[gnu::always_inline]] inline void scale_block(const float* __restrict exponentials, float factor, bf16* dlogits, int64_t n) {
  const int64_t half = n / 2;
  for (int64_t j = 0; j < half; ++j) {
    lane::words(dlogits)[j] = lane::word(exponentials[j] * factor, exponentials[half + j] * factor);
  }
  if (n % 2 != 0) lane::store(dlogits[n - 1], exponentials[n - 1] * factor);
}

// block and references are scratch: the exponentials of a block, and one element for each block. dlogits may be null.
template <class T>
[[gnu::always_inline]] inline float row_loss(const CrossEntropy& k, const T* logits, T* dlogits, int64_t target, float* block,
                                             float* references) {
  const auto exponentials = [&](int64_t first) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<T, float>) return dlogits == nullptr ? block : dlogits + first;
    return block;
  };
  const float target_logit = lane::load(logits[target]), scale = static_cast<float>(k.scale);
  RowSums sums;
  for (int64_t j = 0; j < k.vocab; j += kBlock) {
    add_block(logits + j, std::min(kBlock, k.vocab - j), sums, exponentials(j));
    references[j / kBlock] = sums.largest;
  }
  const float loss = sums.largest + std::log(sums.sum) - target_logit;
  if (dlogits == nullptr) return loss;
  for (int64_t j = 0; j < k.vocab; j += kBlock) {
    const int64_t n = std::min(kBlock, k.vocab - j);
    const float reference = references[j / kBlock], factor = std::exp(reference - sums.largest) / sums.sum * scale;
    if constexpr (std::is_same_v<T, bf16>) exponentials_of(logits + j, reference, block, n);
    scale_block(exponentials(j), factor, dlogits + j, n);
  }
  const float p = std::exp(target_logit - sums.largest) / sums.sum;
  lane::store(dlogits[target], scale * (p - 1.0F));
  std::fill(dlogits + k.vocab, dlogits + k.logits.dim(1), T{});
  return loss;
}

template <class T>
[[gnu::always_inline]] inline float log_sum_of_row(const T* logits, int64_t columns, float* block) {
  RowSums sums;
  for (int64_t j = 0; j < columns; j += kBlock) add_block(logits + j, std::min(kBlock, columns - j), sums, block);
  return sums.largest + std::log(sums.sum);
}

// dlogits = scale * e^(logits - log_sum), of which the caller takes scale at the target.
template <class T>
[[gnu::always_inline]] inline void scaled_softmax(const T* logits, float log_sum, float scale, T* dlogits, int64_t own, float* scratch) {
  for (int64_t j = 0; j < own; j += kBlock) {
    const int64_t n = std::min(kBlock, own - j);
    exponentials_of(logits + j, log_sum, scratch, n);
    scale_block(scratch, scale, dlogits + j, n);
  }
}

// Blocks of two rows of distillation, widened, and what is computed of them.
struct TwoBlocks {
  alignas(64) float logits[kBlock], teacher[kBlock], exponentials[kBlock];
};

template <class T>
[[gnu::always_inline]] inline float largest_of_row(const T* x, int64_t n) {
  float largest = std::numeric_limits<float>::lowest();
  for (int64_t j = 0; j < n; j += kBlock) largest = largest_of(x + j, std::min(kBlock, n - j), largest);
  return largest;
}

// exponentials = e^(x * factor - subtracted), whose exponent is at most 0. Both may be the same memory.
[[gnu::always_inline]] inline void scaled_exponentials(const float* x, float factor, float subtracted, float* exponentials, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) exponentials[j] = lane::exponent_negative(x[j] * factor - subtracted);
  for (int64_t j = 0; j < n; ++j) exponentials[j] = lane::exp2_inside<float>(exponentials[j]);
}

// Writes the sums of DistillationShare but for the target's logit.
template <class T>
[[gnu::always_inline]] inline void distillation_sums(const T* logits, const T* teacher, int64_t own, float factor, TwoBlocks& block,
                                                     float* sums) {
  const float largest = largest_of_row(logits, own), of_teacher = largest_of_row(teacher, own);
  const float subtracted = largest * factor, from_teacher = of_teacher * factor;
  float sum = 0.0F, teacher_sum = 0.0F, label_sum = 0.0F, cross = 0.0F;
  for (int64_t j = 0; j < own; j += kBlock) {
    const int64_t n = std::min(kBlock, own - j);
    simd::convert(logits + j, block.logits, n);
    simd::convert(teacher + j, block.teacher, n);
    scaled_exponentials(block.logits, factor, subtracted, block.exponentials, n);
    sum += sum_of(block.exponentials, n);
    if (factor != 1.0F) {
      scaled_exponentials(block.logits, 1.0F, largest, block.exponentials, n);
      label_sum += sum_of(block.exponentials, n);
    }
    scaled_exponentials(block.teacher, factor, from_teacher, block.exponentials, n);
    teacher_sum += sum_of(block.exponentials, n);
    for (int64_t i = 0; i < n; ++i) block.exponentials[i] *= block.teacher[i] - block.logits[i];
    cross += sum_of(block.exponentials, n);
  }
  sums[0] = subtracted + std::log(sum);
  sums[1] = from_teacher + std::log(teacher_sum);
  sums[2] = own > 0 ? cross * factor / teacher_sum : 0.0F;
  sums[3] = factor != 1.0F ? largest + std::log(label_sum) : sums[0];
}

// target: its column, or one that is not here.
template <class T>
[[gnu::always_inline]] inline void distillation_gradient(const T* logits, const T* teacher, T* dlogits, int64_t own, int64_t target,
                                                         const DistilledRow<float>& row, const DistillationFactors<float>& factors,
                                                         TwoBlocks& block) {
  const float factor = factors.per_temperature;
  for (int64_t j = 0; j < own; j += kBlock) {
    const int64_t n = std::min(kBlock, own - j);
    simd::convert(logits + j, block.logits, n);
    simd::convert(teacher + j, block.teacher, n);
    scaled_exponentials(block.teacher, factor, row.teacher_log_sum, block.teacher, n);
    scaled_exponentials(block.logits, factor, row.log_sum, block.exponentials, n);
    for (int64_t i = 0; i < n; ++i) block.teacher[i] = factors.gradient_of_divergence * (block.exponentials[i] - block.teacher[i]);
    if (factors.labels > 0.0F) {
      scaled_exponentials(block.logits, 1.0F, row.label_log_sum, block.exponentials, n);
      if (target >= j && target < j + n) block.exponentials[target - j] -= 1.0F;
      for (int64_t i = 0; i < n; ++i) block.teacher[i] += factors.gradient_of_labels * block.exponentials[i];
    }
    simd::convert(block.teacher, dlogits + j, n);
  }
}

// Scratch of the executing thread; the references grow to the longest row and are kept.
struct Scratch {
  alignas(64) float block[kBlock];  // a vector that crosses cache lines is stored at half the speed
  std::vector<float> references;
};

}  // namespace

void CpuBackend::execute(const CrossEntropy& k) {
  check_indices(k.targets, IndexRule::targets("cross_entropy", k.vocab));
  const int64_t columns = k.logits.dim(1);
  const auto blocks = static_cast<size_t>(ceil_div(k.vocab, kBlock));
  const int32_t* targets = k.targets.device_data<int32_t>();
  float* loss = k.loss.device_data<float>();
  with_narrow_values(k.logits.dtype(), [&]<class T>() {
    const T* logits = k.logits.device_data<T>();
    T* dlogits = k.dlogits.defined() ? k.dlogits.device_data<T>() : nullptr;
    parallel_for(k.logits.dim(0), rows_per_piece(4 * columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      thread_local Scratch scratch;
      if (scratch.references.size() < blocks) scratch.references.resize(blocks);
      for (int64_t i = begin; i < end; ++i) {
        T* gradient = dlogits == nullptr ? nullptr : dlogits + i * columns;
        if (targets[i] < 0) {
          loss[i] = 0.0F;
          if (gradient != nullptr) std::fill_n(gradient, columns, T{});
          continue;
        }
        loss[i] = cloned<row_loss<T>>(k, logits + i * columns, gradient, targets[i], scratch.block, scratch.references.data());
      }
    });
  });
}

void CpuBackend::execute(const CrossEntropyShare& k) {
  check_indices(k.targets, IndexRule::targets("cross_entropy_share", k.vocab));
  const int64_t columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
  const int32_t* targets = k.targets.device_data<int32_t>();
  float* sums = k.sums.device_data<float>();
  with_narrow_values(k.logits.dtype(), [&]<class T>() {
    parallel_for(k.logits.dim(0), rows_per_piece(2 * columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      alignas(64) float block[kBlock];
      for (int64_t i = begin; i < end; ++i) {
        const T* logits = k.logits.device_data<T>() + i * columns;
        const int64_t target = targets[i] - k.first;
        sums[2 * i] = targets[i] < 0 ? 0.0F : cloned<log_sum_of_row<T>>(logits, own, block);
        sums[2 * i + 1] = targets[i] >= 0 && target >= 0 && target < own ? lane::load(logits[target]) : 0.0F;
      }
    });
  });
}

void CpuBackend::execute(const CrossEntropyOfShares& k) {
  check_indices(k.targets, IndexRule::targets("cross_entropy_of_shares", k.vocab));
  const int64_t rows = k.logits.dim(0), columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
  const int32_t* targets = k.targets.device_data<int32_t>();
  const float *sums = k.sums.device_data<float>(), scale = static_cast<float>(k.scale);
  float* loss = k.loss.device_data<float>();
  with_narrow_values(k.logits.dtype(), [&]<class T>() {
    parallel_for(rows, rows_per_piece(2 * columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      alignas(64) float scratch[kBlock];
      for (int64_t i = begin; i < end; ++i) {
        const auto row = combined(sums, k.sums.dim(0), rows, i);
        loss[i] = targets[i] < 0 ? 0.0F : row.loss;
        if (!k.dlogits.defined()) continue;
        const T* logits = k.logits.device_data<T>() + i * columns;
        T* dlogits = k.dlogits.device_data<T>() + i * columns;
        if (targets[i] < 0) {
          std::fill_n(dlogits, columns, T{});
          continue;
        }
        const int64_t target = targets[i] - k.first;
        const bool here = target >= 0 && target < own;
        const float p = here ? std::exp(lane::load(logits[target]) - row.log_sum) : 0.0F;
        cloned<scaled_softmax<T>>(logits, row.log_sum, scale, dlogits, own, scratch);
        if (here) lane::store(dlogits[target], scale * (p - 1.0F));
        std::fill(dlogits + own, dlogits + columns, T{});
      }
    });
  });
}

void CpuBackend::execute(const DistillationShare& k) {
  check_indices(k.targets, IndexRule::targets("distillation_share", k.vocab));
  const int64_t columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
  const int32_t* targets = k.targets.device_data<int32_t>();
  const float factor = static_cast<float>(1.0 / k.temperature);
  with_narrow_values(k.logits.dtype(), [&]<class T>() {
    parallel_for(k.logits.dim(0), rows_per_piece(4 * columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      TwoBlocks block;
      for (int64_t i = begin; i < end; ++i) {
        float* sums = k.sums.device_data<float>() + i * DistillationShare::kSums;
        std::fill_n(sums, DistillationShare::kSums, 0.0F);
        if (targets[i] < 0) continue;
        const T *logits = k.logits.device_data<T>() + i * columns, *teacher = k.teacher.device_data<T>() + i * columns;
        const int64_t target = targets[i] - k.first;
        cloned<distillation_sums<T>>(logits, teacher, own, factor, block, sums);
        if (target >= 0 && target < own) sums[4] = lane::load(logits[target]);
      }
    });
  });
}

void CpuBackend::execute(const DistillationOfShares& k) {
  check_indices(k.targets, IndexRule::targets("distillation_of_shares", k.vocab));
  const int64_t rows = k.logits.dim(0), columns = k.logits.dim(1), own = own_columns(k.first, columns, k.vocab);
  const int32_t* targets = k.targets.device_data<int32_t>();
  const float* sums = k.sums.device_data<float>();
  const DistillationFactors<float> factors(k.temperature, k.weight, k.scale);
  with_narrow_values(k.logits.dtype(), [&]<class T>() {
    parallel_for(rows, rows_per_piece(4 * columns), Subnormals::flushed, [&](int64_t begin, int64_t end) {
      TwoBlocks block;
      for (int64_t i = begin; i < end; ++i) {
        const auto row = distilled(sums, k.sums.dim(0), rows, i, factors);
        k.loss.device_data<float>()[i] = targets[i] < 0 ? 0.0F : row.loss;
        if (!k.dlogits.defined()) continue;
        const T *logits = k.logits.device_data<T>() + i * columns, *teacher = k.teacher.device_data<T>() + i * columns;
        T* dlogits = k.dlogits.device_data<T>() + i * columns;
        const int64_t written = targets[i] < 0 ? 0 : own;
        if (written > 0) cloned<distillation_gradient<T>>(logits, teacher, dlogits, own, targets[i] - k.first, row, factors, block);
        std::fill(dlogits + written, dlogits + columns, T{});
      }
    });
  });
}

}  // namespace mantissa
