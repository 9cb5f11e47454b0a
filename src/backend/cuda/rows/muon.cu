#include <cmath>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/rows/moments.h"
#include "backend/muon_rule.h"

namespace mantissa {
namespace {

using namespace gpu;

template <class M>
struct Momentum {
  MuonMomentumRule<float> rule;
  Packs<M> m;
  Packs<const float> grad;
  const float* step;
  MomentWords words;
};

template <class M, class T>
__global__ void __launch_bounds__(kThreads) muon_momentum(Momentum<M> k, Packs<T> out) {
  const bool skip = k.step[static_cast<int>(StepValue::skip)] != 0.0F;
  const AdamWStep<float> step(k.step);
  for_each_pack(k.m.count, [=](int64_t first) {
    Pack m = k.m.read(first), next;
    const Pack grad = k.grad.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) next.at[i] = k.rule.apply(step, m.at[i], grad.at[i]);
    out.write(first, next);
    if (skip) return;
    if constexpr (std::is_same_v<M, bf16>) {
      write_moments(k.m, first, m, words_of_pack(k.words, first), 0);
    } else {
      k.m.write(first, m);
    }
  });
}

struct Updated {
  MuonUpdateRule<float> rule;
  Packs<float> master;
  const float* step;
};

// value.values may be null.
template <class D, class T>
__global__ void __launch_bounds__(kThreads) muon_update(Updated k, Packs<const D> direction, Packs<T> value) {
  const bool skip = k.step[static_cast<int>(StepValue::skip)] != 0.0F;
  const AdamWStep<float> step(k.step);
  for_each_pack(k.master.count, [=](int64_t first) {
    Pack master = k.master.read(first);
    if (!skip) {
      const Pack along = direction.read(first);
      MANTISSA_UNROLL
      for (unsigned i = 0; i < kPack; ++i) k.rule.apply(step, master.at[i], along.at[i]);
      k.master.write(first, master);
    }
    if (value.values != nullptr) value.write(first, master);
  });
}

// Every block sums the partials in their order, which is that of the reference.
template <class T>
__global__ void __launch_bounds__(kThreads) divide_by_norm(Packs<const T> x, const double* partials, int64_t partial_count, Packs<T> out) {
  const double sum = sum_in_order(partials, partial_count);
  float& norm = block_shared<float>();
  if (thread() == 0) norm = static_cast<float>(fmax(sqrt(sum), kSmallestNorm));
  barrier();
  for_each_pack(x.count, [=, by = norm](int64_t first) {
    Pack pack = x.read(first);
    MANTISSA_UNROLL
    for (unsigned i = 0; i < kPack; ++i) pack.at[i] /= by;
    out.write(first, pack);
  });
}

struct Polynomial {
  float a, b, c;
};

template <class T>
__global__ void __launch_bounds__(kThreads) newton_schulz_polynomial(T* gram, const float* square, Polynomial p, int64_t columns) {
  for_each_element(columns * columns, [=](int64_t i) {
    const bool diagonal = i / columns == i % columns;
    gram[i] = rounded<T>(p.b * value_of(gram[i]) + p.c * square[i] + (diagonal ? p.a : 0.0F));
  });
}

}  // namespace

void CudaBackend::execute(const MuonMomentum& k) {
  const Grid grid{blocks_for_packs(k.m.elements()), kThreads};
  with_values(k.m.dtype(), [&]<class M>() {
    const Momentum<M> momentum{MuonMomentumRule<float>(k), packs_of<M>(k.m), packs_of<const float>(k.grad), k.step.device_data<float>(),
                               MomentWords(k.rounding, k.m.shape())};
    with_values(k.out.dtype(), [&]<class T>() { launch(muon_momentum<M, T>, grid, momentum, packs_of<T>(k.out)); });
  });
}

void CudaBackend::execute(const MuonUpdate& k) {
  const Grid grid{blocks_for_packs(k.master.elements()), kThreads};
  const Updated update{.rule = MuonUpdateRule<float>(k), .master = packs_of<float>(k.master), .step = k.step.device_data<float>()};
  with_values(k.direction.dtype(), [&]<class D>() {
    const auto direction = packs_of<const D>(k.direction);
    if (!k.value.defined()) return launch(muon_update<D, float>, grid, update, direction, Packs<float>{});
    with_values(k.value.dtype(), [&]<class T>() { launch(muon_update<D, T>, grid, update, direction, packs_of<T>(k.value)); });
  });
}

void CudaBackend::execute(const DivideByNorm& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    launch(divide_by_norm<T>, {blocks_for_packs(k.x.elements()), kThreads}, packs_of<const T>(k.x), k.partials.device_data<double>(),
           k.partials.elements(), packs_of<T>(k.out));
  });
}

void CudaBackend::execute(const NewtonSchulzPolynomial& k) {
  const Polynomial p{.a = static_cast<float>(k.a), .b = static_cast<float>(k.b), .c = static_cast<float>(k.c)};
  with_values(k.gram.dtype(), [&]<class T>() {
    launch(newton_schulz_polynomial<T>, {blocks_for(k.gram.elements()), kThreads}, k.gram.device_data<T>(), k.square.device_data<float>(),
           p, k.gram.dim(0));
  });
}

}  // namespace mantissa
