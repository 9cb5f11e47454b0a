#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

#include "backend/adamw_rule.h"
#include "backend/cpu/moments.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "base/parallel.h"

namespace mantissa {
namespace {

template <class T>
void fill(const Fill& k) {
  T* out = k.out.device_data<T>();
  for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<T>(k.value);
}

}  // namespace

CpuReference::CpuReference() { start_threads(); }

std::shared_ptr<std::byte> CpuReference::allocate(int64_t bytes) { return allocator_->allocate(bytes); }
AllocatorStats CpuReference::allocator_stats() const { return allocator_->stats(); }
void CpuReference::upload(const void* from, const Tensor& to) {
  std::copy_n(static_cast<const std::byte*>(from), to.bytes(), to.device_bytes());
}
void CpuReference::download(const Tensor& from, void* to) { std::copy_n(from.device_bytes(), from.bytes(), static_cast<std::byte*>(to)); }

void CpuReference::execute(const Fill& k) {
  if (k.out.dtype() == Dtype::i32) return fill<int32_t>(k);
  if (k.out.dtype() == Dtype::u8) return fill<uint8_t>(k);
  with_values(k.out.dtype(), [&]<class T>() { fill<T>(k); });
}

void CpuReference::execute(const Convert& k) {
  if (k.x.dtype() == k.out.dtype()) {
    std::memcpy(k.out.device_bytes(), k.x.device_bytes(), static_cast<size_t>(k.x.bytes()));
    return;
  }
  with_values(k.x.dtype(), [&]<class From>() {
    with_values(k.out.dtype(), [&]<class To>() {
      const From* x = k.x.device_data<From>();
      To* out = k.out.device_data<To>();
      for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<To>(load(x[i]));
    });
  });
}

void CpuReference::execute(const RandomNormal& k) {
  with_values(k.out.dtype(), [&]<class T>() {
    const int64_t columns = k.out.shape().rank() > 0 ? k.out.shape()[-1] : 1, stride = k.row_stride > 0 ? k.row_stride : columns;
    T* out = k.out.device_data<T>();
    for (int64_t i = 0; i < k.out.elements(); ++i) {
      const int64_t index = k.first_index + i / columns * stride + i % columns;
      out[i] = store<T>(k.std * static_cast<double>(random_normal(k.key, k.what, static_cast<uint64_t>(index))));
    }
  });
}

void CpuReference::execute(const Add& k) {
  with_values(k.out.dtype(), [&]<class T>() {
    const T *a = k.a.device_data<T>(), *b = k.b.device_data<T>();
    T* out = k.out.device_data<T>();
    for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<T>(load(a[i]) + load(b[i]));
  });
}

void CpuReference::execute(const TreeSum& k) {
  with_values(k.own.dtype(), [&]<class T>() {
    const int64_t count = k.own.elements(), operands = k.others.dim(0) + 1;
    T *own = k.own.device_data<T>(), *others = k.others.device_data<T>();
    const auto operand = [&](int64_t i) { return i == k.place ? own : others + (i - (i > k.place ? 1 : 0)) * count; };
    for (int64_t distance = 1; distance < operands; distance *= 2) {
      for (int64_t i = 0; i + distance < operands; i += 2 * distance) {
        T *a = operand(i), *b = operand(i + distance);
        for (int64_t j = 0; j < count; ++j) a[j] = store<T>(load(a[j]) + load(b[j]));
      }
    }
    if (k.place != 0) std::copy_n(operand(0), count, own);
  });
}

void CpuReference::execute(const AddBias& k) {
  with_values(k.out.dtype(), [&]<class T>() {
    const auto* x = k.x.device_data<Arithmetic<T>>();
    const T* bias = k.bias.device_data<T>();
    T* out = k.out.device_data<T>();
    const int64_t columns = k.x.dim(1);
    for (int64_t i = 0; i < k.out.elements(); ++i) out[i] = store<T>(x[i] + load(bias[i % columns]));
  });
}

void CpuReference::execute(const EmbeddingForward& k) {
  check_indices(k.ids, IndexRule::below(ExitCode::data, "embedding", "ids", k.part.limit(k.weight.dim(0))));
  with_values(k.weight.dtype(), [&]<class T>() {
    const int64_t channels = k.weight.dim(1);
    const int32_t* ids = k.ids.device_data<int32_t>();
    const T* weight = k.weight.device_data<T>();
    T* out = k.out.device_data<T>();
    for (int64_t i = 0; i < k.ids.dim(0); ++i) {
      const int64_t row = ids[i] - k.part.first;
      if (row >= 0 && row < k.weight.dim(0)) {
        std::copy_n(weight + row * channels, channels, out + i * channels);
      } else {
        std::fill_n(out + i * channels, channels, T{});
      }
    }
  });
}

void CpuReference::execute(const EmbeddingBackward& k) {
  check_indices(k.ids, IndexRule::below(ExitCode::data, "embedding backward", "ids", k.part.limit(k.dweight.dim(0))));
  with_values(k.dy.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t channels = k.dy.dim(1);
    const int32_t* ids = k.ids.device_data<int32_t>();
    const T* dy = k.dy.device_data<T>();
    S* dweight = k.dweight.device_data<S>();
    if (!k.accumulate) std::fill_n(dweight, k.dweight.elements(), S{0});
    for (int64_t i = 0; i < k.ids.dim(0); ++i) {
      const int64_t row = ids[i] - k.part.first;
      if (row < 0 || row >= k.dweight.dim(0)) continue;
      for (int64_t j = 0; j < channels; ++j) dweight[row * channels + j] += load(dy[i * channels + j]);
    }
  });
}

namespace {

template <class S, class M>
void adamw(const AdamW& k) {
  const AdamWRule<S> rule(k);
  const AdamWStep<S> step(k.step.device_data<float>());
  S* master = k.master.device_data<S>();
  M *m = k.m.device_data<M>(), *v = k.v.device_data<M>();
  const S* grad = k.grad.device_data<S>();
  const bool skip = k.step.device_data<float>()[static_cast<int>(StepValue::skip)] != 0.0F;
  StoredMoments<M> stored(k.rounding, k.m.shape());
  for (int64_t i = 0; !skip && i < k.master.elements(); ++i) {
    S own_m = load(m[i]), own_v = load(v[i]);
    rule.apply(step, master[i], own_m, own_v, grad[i]);
    m[i] = stored.first(own_m, i), v[i] = stored.second(own_v, i);
  }
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

void CpuReference::execute(const AdamW& k) {
  const bool narrow = k.m.dtype() == Dtype::bf16;
  if (k.master.dtype() == Dtype::f64) return narrow ? adamw<double, bf16>(k) : adamw<double, double>(k);
  narrow ? adamw<float, bf16>(k) : adamw<float, float>(k);
}

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

void CpuReference::execute(const Sum& k) {
  with_values(k.x.dtype(), [&]<class T>() {
    const T* x = k.x.device_data<T>();
    double total = 0.0;
    for (int64_t i = 0; i < k.x.elements(); ++i) total += static_cast<double>(load(x[i]));
    *k.out.device_data<double>() = k.factor * total;
  });
}

}  // namespace mantissa
