#include "backend/cpu/fast/clones.h"
#include "backend/cpu/fast/cpu_backend.h"
#include "backend/cpu/fast/simd.h"
#include "backend/cpu/pieces.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

using simd::Floats;

struct Update {
  float *master, *m, *v;
  const float* grad;
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay;
  float lr, inverse_bias_correction1, inverse_bias_correction2, clip_factor;
};

Update update_of(const AdamW& k) {
  const float* step = k.step.device_data<float>();
  const auto value = [&](StepValue which) { return step[static_cast<int>(which)]; };
  return {.master = k.master.device_data<float>(),
          .m = k.m.device_data<float>(),
          .v = k.v.device_data<float>(),
          .grad = k.grad.device_data<float>(),
          .beta1 = static_cast<float>(k.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - k.beta1),
          .beta2 = static_cast<float>(k.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - k.beta2),
          .eps = static_cast<float>(k.eps),
          .weight_decay = static_cast<float>(k.weight_decay),
          .lr = value(StepValue::lr),
          .inverse_bias_correction1 = value(StepValue::inverse_bias_correction1),
          .inverse_bias_correction2 = value(StepValue::inverse_bias_correction2),
          .clip_factor = value(StepValue::clip_factor)};
}

// Does the reference's operations in the reference's order, without fma, which gives the same bits. Returns the new master.
template <class Count>
[[gnu::always_inline]] inline Floats step(Update u, int64_t i, Count part) {
  const Floats g = simd::load(u.grad + i, part) * u.clip_factor;
  const Floats m = u.beta1 * simd::load(u.m + i, part) + u.one_minus_beta1 * g;
  const Floats v = u.beta2 * simd::load(u.v + i, part) + u.one_minus_beta2 * g * g;
  const Floats m_hat = m * u.inverse_bias_correction1, v_hat = v * u.inverse_bias_correction2;
  Floats master = simd::load(u.master + i, part);
  const Floats update = m_hat / (simd::sqrt(v_hat) + u.eps) + u.weight_decay * master;
  master -= u.lr * update;
  simd::store(u.m + i, m, part);
  simd::store(u.v + i, v, part);
  simd::store(u.master + i, master, part);
  return master;
}

template <class T>
[[gnu::always_inline]] inline void adamw_range(Update u, T* value, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) {
        const Floats master = step(u, begin + j, part);
        simd::store(value + begin + j, master, part);
      });
}

[[gnu::always_inline]] inline void adamw_masters(Update u, int64_t begin, int64_t end) {
  simd::for_lanes(
      end - begin, [&](int64_t j, auto part) __attribute__((always_inline)) { step(u, begin + j, part); });
}

template <class T>
void adamw_parallel(const Update& u, int64_t elements, T* value) {
  parallel_for(elements, kPieceElements / 2, [&](int64_t begin, int64_t end) { cloned<adamw_range<T>>(u, value, begin, end); });
}
void adamw_parallel(const Update& u, int64_t elements) {
  parallel_for(elements, kPieceElements / 2, [&](int64_t begin, int64_t end) { cloned<adamw_masters>(u, begin, end); });
}

// Sum of squares of x[0, n), in fp64.
[[gnu::always_inline]] inline double squares_of(const float* x, int64_t n) {
  simd::Doubles sums[4] = {};
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    for (int64_t slot = 0; slot < 4; ++slot) {
      const simd::Doubles value = simd::load_doubles(x + j + 4 * slot);
      sums[slot] += value * value;
    }
  }
  const simd::Doubles lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  for (; j < n; ++j) total += static_cast<double>(x[j]) * static_cast<double>(x[j]);
  return total;
}

[[gnu::always_inline]] inline void squares(const float* x, int64_t row_block, int64_t elements, double* partials, int64_t begin,
                                           int64_t end) {
  for (int64_t i = begin; i < end; ++i) partials[i] = squares_of(x + i * row_block, std::min(row_block, elements - i * row_block));
}

}  // namespace

void CpuBackend::execute(const AdamW& k) {
  if (k.step.device_data<float>()[static_cast<int>(StepValue::skip)] != 0.0F) return CpuReference::execute(k);
  const Update u = update_of(k);
  const int64_t elements = k.master.elements();
  if (!k.value.defined()) return adamw_parallel(u, elements);
  if (k.value.dtype() == Dtype::bf16) return adamw_parallel(u, elements, k.value.device_data<bf16>());
  adamw_parallel(u, elements, k.value.device_data<float>());
}

void CpuBackend::execute(const SquaredNorm& k) {
  if (k.x.dtype() != Dtype::f32) return CpuReference::execute(k);  // gradients are fp32
  const int64_t row_block = 32 * k.x.shape().with_dim0(1).elements(), elements = k.x.elements();
  const float* x = k.x.device_data<float>();
  double* partials = k.partials.device_data<double>();
  parallel_for(k.partials.dim(0), rows_per_piece(row_block),
               [&](int64_t begin, int64_t end) { cloned<squares>(x, row_block, elements, partials, begin, end); });
}

}  // namespace mantissa
