// Load-balancing losses of routers: what all backends multiply by.
#pragma once

#include <cstdint>

#include "mantissa/backend/backend.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

// The factor of the sum over tokens and experts of counts times P in a balance loss.
inline double balance_factor(const RoutingRule& rule, int64_t experts, int64_t tokens) {
  const double n = static_cast<double>(tokens);
  return static_cast<double>(experts) / (static_cast<double>(rule.top_k) * n * n);
}

// Coefficients out [S, E] of P in the sum of both balance losses, counts [S, E] being those of sequences; of expert e.
template <class S>
MANTISSA_HOST_DEVICE void write_balance_coefficients(const int32_t* counts, int64_t sequences, int64_t experts, int64_t e, double all,
                                                     double own, S* out) {
  int64_t total = 0;
  for (int64_t s = 0; s < sequences; ++s) total += counts[s * experts + e];
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t i = s * experts + e;
    out[i] = static_cast<S>(all * static_cast<double>(total) + own * static_cast<double>(counts[i]));
  }
}

}  // namespace mantissa
