#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/indices.h"
#include "backend/cpu/lane_math.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/simd.h"
#include "mantissa/base/host_device.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats, simd::Slots;

// A row is read once: block by block, its exponentials against the largest logit so far are kept, and the second pass over the cached row
// corrects each block by exp(its reference - the largest). So the memory is busy while the exponentials are computed, and there is one per
// logit.
constexpr int64_t kBlock = 512;

struct RowSums {
  float largest = std::numeric_limits<float>::lowest();  // finite, so that a block of -Inf gives zeros
  float sum = 0.0F;                                      // of exp(logit - largest)
};

template <class T>
[[gnu::always_inline]] inline float largest_of(const T* logits, int64_t n, float start) {
  Slots largest;
  for (Floats& slot : largest.slot) slot = simd::broadcast(start);
  simd::for_values(
      logits, n, start, [&](Floats x, int slot) __attribute__((always_inline)) { largest.slot[slot] = simd::max(x, largest.slot[slot]); });
  const Floats all = simd::max(simd::max(largest.slot[0], largest.slot[1]), simd::max(largest.slot[2], largest.slot[3]));
  float result = start;
  for (int i = 0; i < simd::kLanes; ++i) result = all[i] > result ? all[i] : result;
  return result;
}

// exponentials = e^(logits - largest). Both may be the same memory: no element is read after another was written in its place.
[[gnu::always_inline]] inline void exponentials_of(const float* logits, float largest, float* exponentials, int64_t n) {
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j) exponentials[j] = lane::exp_negative(logits[j] - largest);
}
// The lower halves of words, then the upper halves, then a last element.
[[gnu::always_inline]] inline void exponentials_of(const bf16* logits, float largest, float* __restrict exponentials, int64_t n) {
  const int64_t half = n / 2;
  for (int64_t j = 0; j < half; ++j) {
    const uint32_t word = lane::words(logits)[j];
    exponentials[j] = lane::exp_negative(lane::low(word) - largest);
    exponentials[half + j] = lane::exp_negative(lane::high(word) - largest);
  }
  if (n % 2 != 0) exponentials[n - 1] = lane::exp_negative(lane::load(logits[n - 1]) - largest);
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
  sums.sum = sums.sum * std::exp(sums.largest - largest) + sum_of(exponentials, n);
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

template <class T>
struct Row {
  const T* logits;
  T* dlogits;  // may be null
  int64_t target, vocab, columns;
  float scale;
  float *exponentials, *references;  // scratch: a row of fp32 (dlogits itself where that is fp32), and one element for each block
};

// One block of scratch is enough where there is no gradient.
template <class T>
[[gnu::always_inline]] inline float row_loss(Row<T> k) {
  const float target_logit = lane::load(k.logits[k.target]);
  const bool keep = k.dlogits != nullptr;
  RowSums sums;
  for (int64_t j = 0; j < k.vocab; j += kBlock) {
    add_block(k.logits + j, std::min(kBlock, k.vocab - j), sums, keep ? k.exponentials + j : k.exponentials);
    k.references[j / kBlock] = sums.largest;
  }
  const float loss = sums.largest + std::log(sums.sum) - target_logit;
  if (!keep) return loss;
  for (int64_t j = 0; j < k.vocab; j += kBlock) {
    const float factor = std::exp(k.references[j / kBlock] - sums.largest) / sums.sum * k.scale;
    scale_block(k.exponentials + j, factor, k.dlogits + j, std::min(kBlock, k.vocab - j));
  }
  const float p = std::exp(target_logit - sums.largest) / sums.sum;
  lane::store(k.dlogits[k.target], k.scale * (p - 1.0F));
  std::fill(k.dlogits + k.vocab, k.dlogits + k.columns, T{});
  return loss;
}

MANTISSA_CLONES float loss_of(Row<float> k) { return row_loss(k); }
MANTISSA_CLONES float loss_of(Row<bf16> k) { return row_loss(k); }

// Of the executing thread; grows to the longest row and is kept. In whole cache lines: a vector that crosses two is stored at half the
// speed.
struct alignas(64) CacheLine {
  static constexpr int64_t kFloats = 16;
  float elements[kFloats];
};
float* scratch(int64_t elements) {
  thread_local std::vector<CacheLine> memory;
  const auto lines = static_cast<size_t>(ceil_div(elements, CacheLine::kFloats));
  if (memory.size() < lines) memory.resize(lines);
  return memory.data()->elements;
}

template <class T>
void losses(const CrossEntropy& k) {
  const int64_t columns = k.logits.dim(1), blocks = ceil_div(k.vocab, kBlock);
  const bool in_dlogits = k.dlogits.defined() && std::is_same_v<T, float>;
  const T* logits = k.logits.device_data<T>();
  T* dlogits = k.dlogits.defined() ? k.dlogits.device_data<T>() : nullptr;
  const int32_t* targets = k.targets.device_data<int32_t>();
  float* loss = k.loss.device_data<float>();
  parallel_for(k.logits.dim(0), rows_per_piece(4 * columns), [&](int64_t begin, int64_t end) {
    float* memory = scratch((in_dlogits ? 0 : std::max(kBlock, k.vocab)) + blocks);
    for (int64_t i = begin; i < end; ++i) {
      T* gradient = dlogits == nullptr ? nullptr : dlogits + i * columns;
      if (targets[i] < 0) {
        loss[i] = 0.0F;
        if (gradient != nullptr) std::fill_n(gradient, columns, T{});
        continue;
      }
      loss[i] = loss_of(Row<T>{.logits = logits + i * columns,
                               .dlogits = gradient,
                               .target = targets[i],
                               .vocab = k.vocab,
                               .columns = columns,
                               .scale = static_cast<float>(k.scale),
                               .exponentials = in_dlogits ? reinterpret_cast<float*>(gradient) : memory,
                               .references = in_dlogits ? memory : memory + std::max(kBlock, k.vocab)});
    }
  });
}

}  // namespace

void CpuBackend::execute(const CrossEntropy& k) {
  check_targets("cross_entropy", k.targets, k.vocab);
  k.logits.dtype() == Dtype::f32 ? losses<float>(k) : losses<bf16>(k);
}

}  // namespace mantissa
