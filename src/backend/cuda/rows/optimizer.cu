#include <cmath>

#include "backend/adamw_rule.h"
#include "backend/cuda/codes/packs.h"
#include "backend/cuda/cuda_backend.h"

namespace mantissa {
namespace {

using namespace gpu;

struct Update {
  AdamWRule<float> rule;
  Packs<float> master, m, v;
  Packs<const float> grad;
  const float* step;
};

// value.values may be null.
template <class T>
__global__ void __launch_bounds__(kThreads) adamw(Update k, Packs<T> value) {
  const bool skip = k.step[static_cast<int>(StepValue::skip)] != 0.0F;
  const AdamWStep<float> step(k.step);
  for_each_pack(k.master.count, [=](int64_t first) {
    Pack master = k.master.read(first);
    if (!skip) {
      Pack m = k.m.read(first), v = k.v.read(first);
      const Pack grad = k.grad.read(first);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) k.rule.apply(step, master.at[i], m.at[i], v.at[i], grad.at[i]);
      k.master.write(first, master), k.m.write(first, m), k.v.write(first, v);
    }
    if (value.values != nullptr) value.write(first, master);
  });
}

// A block has 32 rows.
template <class T>
__global__ void __launch_bounds__(kThreads) squared_norm(const T* x, int64_t count, int64_t of_rows, double* partials) {
  const int64_t first = block() * of_rows, end = first + of_rows < count ? first + of_rows : count;
  double sum = 0.0;
  for (int64_t i = first + thread(); i < end; i += kThreads)
    sum += static_cast<double>(value_of(x[i])) * static_cast<double>(value_of(x[i]));
  sum = block_sum(sum);
  if (thread() == 0) partials[block()] = sum;
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

void CudaBackend::execute(const AdamW& k) {
  const Grid grid{blocks_for_packs(k.master.elements()), kThreads};
  const Update update{AdamWRule<float>(k),  packs_of<float>(k.master),     packs_of<float>(k.m),
                      packs_of<float>(k.v), packs_of<const float>(k.grad), k.step.device_data<float>()};
  if (!k.value.defined()) return launch(adamw<float>, grid, update, Packs<float>{});
  with_values(k.value.dtype(), [&]<class T>() { launch(adamw<T>, grid, update, packs_of<T>(k.value)); });
}

void CudaBackend::execute(const SquaredNorm& k) {
  constexpr int64_t kRows = 32;
  with_values(k.x.dtype(), [&]<class T>() {
    launch(squared_norm<T>, {k.partials.dim(0), kThreads}, k.x.device_data<T>(), k.x.elements(),
           kRows * k.x.shape().with_dim0(1).elements(), k.partials.device_data<double>());
  });
}

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
