#include <cmath>

#include "backend/adamw_rule.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/moments.h"

namespace mantissa {
namespace {

using namespace gpu;

// One of the tensors that the blocks of a launch share, from block first_block on.
template <class M>
struct Update {
  int64_t first_block;
  AdamWRule<float> rule;
  Packs<float> master;
  Packs<M> m, v;
  Packs<const float> grad;
  const float* step;
  MomentWords words;
  Packs<float> value;  // one of the two, or none
  Packs<bf16> narrow_value;
};
struct Squares {
  int64_t first_block;
  const void* x;
  int64_t count, of_rows;
  double* partials;
};

// Returns the tensor that this block belongs to. All threads of a warp call it.
template <class Entry>
__device__ Entry entry_of_block(const Entry* entries, int64_t count) {
  uint32_t begun = 0;
  for (int64_t i = lane(); i < count; i += kWarp) begun += entries[i].first_block <= block() ? 1U : 0U;
  return entries[join_warp(begun, Plus<uint32_t>()) - 1];
}

constexpr int64_t kUpdatedByBlock = int64_t{kThreads} * kPack * 4;  // elements of a block

template <class M>
__global__ void __launch_bounds__(kThreads) adamw(const Update<M>* all, int64_t count) {
  const Update<M> k = entry_of_block(all, count);
  const bool skip = k.step[static_cast<int>(StepValue::skip)] != 0.0F;
  const AdamWStep<float> step(k.step);
  const int64_t begin = (block() - k.first_block) * kUpdatedByBlock,
                end = begin + kUpdatedByBlock < k.master.count ? begin + kUpdatedByBlock : k.master.count;
  for (int64_t first = begin + thread() * kPack; first < end; first += kThreads * kPack) {
    Pack master = k.master.read(first);
    if (!skip) {
      Pack m = k.m.read(first), v = k.v.read(first);
      const Pack grad = k.grad.read(first);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) k.rule.apply(step, master.at[i], m.at[i], v.at[i], grad.at[i]);
      k.master.write(first, master);
      if constexpr (std::is_same_v<M, bf16>) {
        const WordsOfPack words = words_of_pack(k.words, first);
        write_moments(k.m, first, m, words, 0), write_moments(k.v, first, v, words, 16);
      } else {
        k.m.write(first, m), k.v.write(first, v);
      }
    }
    if (k.value.values != nullptr) k.value.write(first, master);
    if (k.narrow_value.values != nullptr) k.narrow_value.write(first, master);
  }
}

// A block has 32 rows.
template <class T>
__global__ void __launch_bounds__(kThreads) squared_norm(const Squares* all, int64_t count) {
  const Squares k = entry_of_block(all, count);
  const T* const x = static_cast<const T*>(k.x);
  const int64_t own = block() - k.first_block, first = own * k.of_rows, end = first + k.of_rows < k.count ? first + k.of_rows : k.count;
  double sum = 0.0;
  for (int64_t i = first + thread(); i < end; i += kThreads)
    sum += static_cast<double>(value_of(x[i])) * static_cast<double>(value_of(x[i]));
  sum = block_sum(sum);
  if (thread() == 0) k.partials[own] = sum;
}

// Sums of neighbors, of pairs of these, and so on, each of which waits for its other half.
struct Halves {
  double sums[64];
};

struct Outcome {
  const double *partials, *losses;
  const int32_t* flags;
  int64_t partial_count, loss_count, flag_count;
  float* step;
  double* outcome;
  double clip;
  bool pairwise;
};

// Runs as one block.
__global__ void __launch_bounds__(kThreads) finish_gradients(Outcome k) {
  uint32_t flag = 0;
  for (int64_t i = thread(); i < k.flag_count; i += kThreads) flag |= k.flags[i] != 0 ? 1U : 0U;
  const bool bad_weights = join_block(flag, 0U, Largest<uint32_t>()) != 0;
  const double squares = sum_in_order(k.partials, k.partial_count);
  double loss = sum_in_order(k.losses, k.pairwise ? 0 : k.loss_count);
  if (thread() != 0) return;
  auto& halves = block_shared<Halves>();
  for (int64_t i = 0; k.pairwise && i < k.loss_count; ++i) {  // a power of two of losses
    loss = k.losses[i];
    int level = 0;
    for (int64_t before = i; before % 2 != 0; before /= 2) loss = halves.sums[level++] + loss;
    halves.sums[level] = loss;
  }
  const double norm = sqrt(squares);
  const bool skip = bad_weights || !std::isfinite(loss) || !std::isfinite(norm);
  const double factor = k.clip > 0.0 && std::isfinite(norm) ? k.clip / (norm + 1e-6) : 1.0;
  k.step[static_cast<int>(StepValue::clip_factor)] = static_cast<float>(factor < 1.0 ? factor : 1.0);
  k.step[static_cast<int>(StepValue::skip)] = skip ? 1.0F : 0.0F;
  k.outcome[static_cast<int>(StepOutcome::loss)] = loss;
  k.outcome[static_cast<int>(StepOutcome::gradient_norm)] = norm;
  k.outcome[static_cast<int>(StepOutcome::bad_weights)] = bad_weights ? 1.0 : 0.0;
  k.outcome[static_cast<int>(StepOutcome::skip)] = skip ? 1.0 : 0.0;
}

}  // namespace

void CudaBackend::execute_all(std::span<const AdamW> all) {
  const Dtype dtype = all.front().m.dtype();
  with_values(dtype, [&]<class M>() {
    std::vector<Update<M>> entries;
    int64_t blocks = 0;
    for (const AdamW& k : all) {
      require(k.m.dtype() == dtype && k.v.dtype() == dtype, "adamw: moments are ", dtype, ", ", k.m.dtype(), " and ", k.v.dtype(),
              ", but all of a call must have one dtype");
      auto& entry = entries.emplace_back(Update<M>{.first_block = blocks,
                                                   .rule = AdamWRule<float>(k),
                                                   .master = packs_of<float>(k.master),
                                                   .m = packs_of<M>(k.m),
                                                   .v = packs_of<M>(k.v),
                                                   .grad = packs_of<const float>(k.grad),
                                                   .step = k.step.device_data<float>(),
                                                   .words = MomentWords(k.rounding, k.m.shape()),
                                                   .value = {},
                                                   .narrow_value = {}});
      if (k.value.defined() && k.value.dtype() == Dtype::f32) entry.value = packs_of<float>(k.value);
      if (k.value.defined() && k.value.dtype() == Dtype::bf16) entry.narrow_value = packs_of<bf16>(k.value);
      blocks += ceil_div(k.master.elements(), kUpdatedByBlock);
    }
    launch_over(adamw<M>, entries, {blocks, kThreads});
  });
}

void CudaBackend::execute_all(std::span<const SquaredNorm> all) {
  constexpr int64_t kRows = 32;
  const Dtype dtype = all.front().x.dtype();
  std::vector<Squares> entries;
  int64_t blocks = 0;
  for (const SquaredNorm& k : all) {
    require(k.x.dtype() == dtype, "squared_norm: x are ", dtype, " and ", k.x.dtype(), ", but all of a call must have one dtype");
    entries.push_back({.first_block = blocks,
                       .x = k.x.device_bytes(),
                       .count = k.x.elements(),
                       .of_rows = kRows * k.x.shape().with_dim0(1).elements(),
                       .partials = k.partials.device_data<double>()});
    blocks += k.partials.dim(0);
  }
  with_values(dtype, [&]<class T>() { launch_over(squared_norm<T>, entries, {blocks, kThreads}); });
}

void CudaBackend::execute(const AdamW& k) { execute_all(std::span(&k, 1)); }

void CudaBackend::execute(const SquaredNorm& k) { execute_all(std::span(&k, 1)); }

void CudaBackend::execute(const FinishGradients& k) {
  launch(finish_gradients, {1, kThreads},
         Outcome{.partials = k.partials.device_data<double>(),
                 .losses = k.losses.device_data<double>(),
                 .flags = k.flags.device_data<int32_t>(),
                 .partial_count = k.partials.elements(),
                 .loss_count = k.losses.elements(),
                 .flag_count = k.flags.elements(),
                 .step = k.step.device_data<float>(),
                 .outcome = k.outcome.device_data<double>(),
                 .clip = k.clip,
                 .pairwise = k.pairwise});
}

}  // namespace mantissa
