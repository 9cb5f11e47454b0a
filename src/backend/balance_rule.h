// Load-balancing losses of routers: the factors that all backends multiply by. Each token that is no padding has K assignments, so the
// counts of a sequence add up to K times its tokens.
#pragma once

#include <cstdint>

#include "mantissa/backend/backend.h"
#include "mantissa/base/host_device.h"

namespace mantissa {

// The factor of the sum over tokens and experts of counts times P in a balance loss; 0 without tokens.
MANTISSA_HOST_DEVICE inline double balance_factor(int64_t top_k, int64_t experts, double tokens) {
  return tokens > 0.0 ? static_cast<double>(experts) / (static_cast<double>(top_k) * tokens * tokens) : 0.0;
}

// Tokens of all sequences together, and the number of sequences that have any: the balance loss of sequences is averaged over these.
struct CountedSequences {
  double tokens = 0.0, with_tokens = 0.0;

  MANTISSA_HOST_DEVICE CountedSequences(const double* tokens_of_sequences, int64_t sequences) {
    for (int64_t s = 0; s < sequences; ++s) {
      tokens += tokens_of_sequences[s];
      with_tokens += tokens_of_sequences[s] > 0.0 ? 1.0 : 0.0;
    }
  }
};

// Coefficients with which the two balance losses join a gradient (RouteBackward).
struct BalanceLosses {
  int64_t top_k;
  double all, of_sequence;
};

// Writes column e, that of an expert, of out [S, E]: the coefficients of P in the sum of both balance losses. counts [S, E] and tokens [S]
// are those of sequences.
template <class S>
MANTISSA_HOST_DEVICE void write_balance_coefficients(const int32_t* counts, const double* tokens, int64_t sequences, int64_t experts,
                                                     int64_t e, const BalanceLosses& losses, S* out) {
  const CountedSequences counted(tokens, sequences);
  const double all = losses.all * balance_factor(losses.top_k, experts, counted.tokens);
  int64_t total = 0;
  for (int64_t s = 0; s < sequences; ++s) total += counts[s * experts + e];
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t i = s * experts + e;
    const double own = tokens[s] > 0.0 ? losses.of_sequence * balance_factor(losses.top_k, experts, tokens[s]) / counted.with_tokens : 0.0;
    out[i] = static_cast<S>(all * static_cast<double>(total) + own * static_cast<double>(counts[i]));
  }
}

}  // namespace mantissa
