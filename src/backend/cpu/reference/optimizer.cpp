#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "backend/adamw_rule.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"

namespace mantissa {
namespace {

template <class S>
void adamw(const AdamW& k) {
  const AdamWRule<S> rule(k);
  const AdamWStep<S> step(k.step.device_data<float>());
  S *master = k.master.device_data<S>(), *m = k.m.device_data<S>(), *v = k.v.device_data<S>();
  const S* grad = k.grad.device_data<S>();
  const bool skip = k.step.device_data<float>()[static_cast<int>(StepValue::skip)] != 0.0F;
  for (int64_t i = 0; !skip && i < k.master.elements(); ++i) rule.apply(step, master[i], m[i], v[i], grad[i]);
  if (!k.value.defined()) return;
  with_values(k.value.dtype(), [&]<class T>() {
    T* value = k.value.device_data<T>();
    for (int64_t i = 0; i < k.value.elements(); ++i) value[i] = store<T>(master[i]);
  });
}

double total_loss(std::span<const double> losses, bool pairwise) {
  if (!pairwise) return std::accumulate(losses.begin(), losses.end(), 0.0);
  if (losses.size() == 1) return losses[0];
  const size_t half = losses.size() / 2;
  return total_loss(losses.first(half), true) + total_loss(losses.last(half), true);
}

}  // namespace

void CpuReference::execute(const AdamW& k) { k.master.dtype() == Dtype::f64 ? adamw<double>(k) : adamw<float>(k); }

void CpuReference::execute(const FinishGradients& k) {
  const double* partials = k.partials.device_data<double>();
  const double norm = std::sqrt(std::accumulate(partials, partials + k.partials.elements(), 0.0));
  const double loss = total_loss({k.losses.device_data<double>(), static_cast<size_t>(k.losses.elements())}, k.pairwise);
  const int32_t* flags = k.flags.device_data<int32_t>();
  const bool bad_weights = std::any_of(flags, flags + k.flags.elements(), [](int32_t flag) { return flag != 0; });
  const bool skip = bad_weights || !std::isfinite(loss) || !std::isfinite(norm);
  const bool clips = k.clip > 0.0 && std::isfinite(norm);
  float* step = k.step.device_data<float>();
  step[static_cast<int>(StepValue::clip_factor)] = static_cast<float>(clips ? std::min(1.0, k.clip / (norm + 1e-6)) : 1.0);
  step[static_cast<int>(StepValue::skip)] = skip ? 1.0F : 0.0F;
  double* outcome = k.outcome.device_data<double>();
  outcome[static_cast<int>(StepOutcome::loss)] = loss;
  outcome[static_cast<int>(StepOutcome::gradient_norm)] = norm;
  outcome[static_cast<int>(StepOutcome::bad_weights)] = bad_weights ? 1.0 : 0.0;
  outcome[static_cast<int>(StepOutcome::skip)] = skip ? 1.0 : 0.0;
}

void CpuReference::execute(const SquaredNorm& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    constexpr int64_t kRows = 32;
    const int64_t row = k.x.shape().with_dim0(1).elements();
    const T* x = k.x.device_data<T>();
    double* partials = k.partials.device_data<double>();
    for (int64_t i = 0; i < k.partials.dim(0); ++i) {
      const int64_t end = std::min((i + 1) * kRows, k.x.dim(0)) * row;
      double sum = 0.0;
      for (int64_t j = i * kRows * row; j < end; ++j) sum += static_cast<double>(load(x[j])) * static_cast<double>(load(x[j]));
      partials[i] = sum;
    }
  });
}

}  // namespace mantissa
