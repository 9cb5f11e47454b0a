#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/cpu/moments.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/muon_rule.h"

namespace mantissa {
namespace {

template <class S, class M, class T>
void momentum(const MuonMomentum& k) {
  const MuonMomentumRule<S> rule(k);
  const float* values = k.step.device_data<float>();
  const AdamWStep<S> step(values);
  const bool skip = values[static_cast<int>(StepValue::skip)] != 0.0F;
  M* m = k.m.device_data<M>();
  const S* grad = k.grad.device_data<S>();
  T* out = k.out.device_data<T>();
  StoredMoments<M> stored(k.rounding, k.m.shape());
  for (int64_t i = 0; i < k.m.elements(); ++i) {
    S own = load(m[i]);
    out[i] = store<T>(rule.apply(step, own, grad[i]));
    if (!skip) m[i] = stored.first(own, i);
  }
}

template <class S>
void update(const MuonUpdate& k) {
  const MuonUpdateRule<S> rule(k);
  const float* values = k.step.device_data<float>();
  const AdamWStep<S> step(values);
  S* master = k.master.device_data<S>();
  with_values(k.direction.dtype(), [&]<class T>() {
    const T* direction = k.direction.device_data<T>();
    const bool skip = values[static_cast<int>(StepValue::skip)] != 0.0F;
    for (int64_t i = 0; !skip && i < k.master.elements(); ++i) rule.apply(step, master[i], static_cast<S>(load(direction[i])));
  });
  if (!k.value.defined()) return;
  with_values(k.value.dtype(), [&]<class T>() {
    T* value = k.value.device_data<T>();
    for (int64_t i = 0; i < k.value.elements(); ++i) value[i] = store<T>(master[i]);
  });
}

}  // namespace

void CpuReference::execute(const MuonMomentum& k) {
  const auto of = [&]<class S, class M>() { with_values(k.out.dtype(), [&]<class T>() { momentum<S, M, T>(k); }); };
  const bool narrow = k.m.dtype() == Dtype::bf16;
  if (k.grad.dtype() == Dtype::f64) return narrow ? of.operator()<double, bf16>() : of.operator()<double, double>();
  narrow ? of.operator()<float, bf16>() : of.operator()<float, float>();
}

void CpuReference::execute(const MuonUpdate& k) { k.master.dtype() == Dtype::f64 ? update<double>(k) : update<float>(k); }

void CpuReference::execute(const DivideByNorm& k) {
  const double* partials = k.partials.device_data<double>();
  const double norm = std::max(std::sqrt(std::accumulate(partials, partials + k.partials.elements(), 0.0)), kSmallestNorm);
  with_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    T* out = k.out.device_data<T>();
    for (int64_t i = 0; i < k.x.elements(); ++i) out[i] = store<T>(load(x[i]) / static_cast<Arithmetic<T>>(norm));
  });
}

void CpuReference::execute(const NewtonSchulzPolynomial& k) {
  with_values(k.gram.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const S a = static_cast<S>(k.a), b = static_cast<S>(k.b), c = static_cast<S>(k.c);
    T* gram = k.gram.device_data<T>();
    const S* square = k.square.device_data<S>();
    for (int64_t i = 0; i < k.gram.elements(); ++i) {
      const bool diagonal = i / k.gram.dim(0) == i % k.gram.dim(0);
      gram[i] = store<T>(b * load(gram[i]) + c * square[i] + (diagonal ? a : S{0}));
    }
  });
}

}  // namespace mantissa
