// AdamW (Loshchilov and Hutter 2019) of one parameter. The order of operations is part of the contract: all backends give the same bits.
#pragma once

#include <cmath>

#include "mantissa/backend/backend.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

// The values that a step has decided, read from AdamW::step.
template <class S>
struct AdamWStep {
  S lr, inverse_bias_correction1, inverse_bias_correction2, clip_factor;

  MANTISSA_HOST_DEVICE explicit AdamWStep(const float* step)
      : lr(static_cast<S>(step[static_cast<int>(StepValue::lr)])),
        inverse_bias_correction1(static_cast<S>(step[static_cast<int>(StepValue::inverse_bias_correction1)])),
        inverse_bias_correction2(static_cast<S>(step[static_cast<int>(StepValue::inverse_bias_correction2)])),
        clip_factor(static_cast<S>(step[static_cast<int>(StepValue::clip_factor)])) {}
};

template <class S>
struct AdamWRule {
  S beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay;

  explicit AdamWRule(const AdamW& k)
      : beta1(static_cast<S>(k.beta1)),
        one_minus_beta1(static_cast<S>(1.0 - k.beta1)),
        beta2(static_cast<S>(k.beta2)),
        one_minus_beta2(static_cast<S>(1.0 - k.beta2)),
        eps(static_cast<S>(k.eps)),
        weight_decay(static_cast<S>(k.weight_decay)) {}

  MANTISSA_HOST_DEVICE void apply(const AdamWStep<S>& step, S& master, S& m, S& v, S grad) const {
    const S g = grad * step.clip_factor;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * g * g;
    const S m_hat = m * step.inverse_bias_correction1;
    const S v_hat = v * step.inverse_bias_correction2;
    const S update = m_hat / (std::sqrt(v_hat) + eps) + weight_decay * master;
    master -= step.lr * update;
  }
};

}  // namespace mantissa
