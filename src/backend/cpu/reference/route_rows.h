// Scores and weights that the router makes from the logits of one token, for its forward and backward. fp32 or fp64, every sum in order.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "mantissa/backend/backend.h"

namespace mantissa {

// Tokens of a piece of parallel work: an exponential for every expert.
inline int64_t tokens_per_piece(int64_t experts) { return std::max<int64_t>(1, 4096 / experts); }

// Returns true if a token is padding, which has no expert: all of its logits are -Inf.
template <class S>
bool is_padding(const S* logits, int64_t experts) {
  return std::all_of(logits, logits + experts, [](S logit) { return logit == -std::numeric_limits<S>::infinity(); });
}

// out = softmax(x), which may be x. Returns log-sum-exp(x).
template <class S>
S softmax(const S* x, int64_t n, S* out) {
  const S largest = *std::max_element(x, x + n);
  S sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += out[i] = std::exp(x[i] - largest);
  for (int64_t i = 0; i < n; ++i) out[i] /= sum;
  return largest + std::log(sum);
}

template <class S>
void score(RouterScore score, const S* x, int64_t n, S* out) {
  if (score == RouterScore::softmax) {
    softmax(x, n, out);
    return;
  }
  for (int64_t i = 0; i < n; ++i) out[i] = S{1} / (S{1} + std::exp(-x[i]));
}

template <class S>
S dot(const S* a, const S* b, int64_t n) {
  S sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// The sum that scores are divided by. That of sigmoids gets 1e-20 more, so that it is never 0.
template <class S>
S sum_of(RouterScore score, const S* scores, int64_t n) {
  S sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += scores[i];
  return score == RouterScore::sigmoid ? sum + static_cast<S>(1e-20) : sum;
}

template <class S>
S weight_sum(const RoutingRule& rule, const S* chosen_scores) {
  return sum_of(rule.score, chosen_scores, rule.top_k);
}

template <class S>
struct RouterRow {
  const S *logits, *scores;
  int64_t experts;
};

// The scores that the weights of the chosen experts are made from, before renormalization and scale.
template <class S>
void chosen_scores(const RoutingRule& rule, const RouterRow<S>& row, const int32_t* chosen, S* out) {
  const S* from = rule.softmax_after_topk ? row.logits : row.scores;
  for (int64_t j = 0; j < rule.top_k; ++j) out[j] = from[chosen[j]];
  if (rule.softmax_after_topk) softmax(out, rule.top_k, out);
}

}  // namespace mantissa
