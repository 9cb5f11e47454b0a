// Scores and weights that the router makes from the logits of one token, which a warp has, for its forward and backward.
#pragma once

#include "backend/cuda/rows/reduce.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/backend.h"

namespace mantissa::gpu {

inline constexpr int64_t kTokensOfBlock = kThreads / kWarp;

// The sequence of a token: there are fewer than 2^31 of them, and a chip divides 32 bits in a few instructions.
__device__ inline int64_t sequence_of(int64_t token, int64_t length) {
  return static_cast<uint32_t>(token) / static_cast<uint32_t>(length);
}

// Returns true, in every lane, if a token is padding, which has no expert: all of its logits are -Inf.
__device__ inline bool is_padding(const float* logits, int64_t width) {
  bool other = false;
  for (int64_t e = lane(); e < width; e += kWarp) other = other || logits[e] != -HUGE_VALF;
  return ballot(other) == 0;
}

// The sum, or the largest, of value(i) for i in [0, n): the same in every lane.
template <class Value>
__device__ inline float warp_sum_of(int64_t n, Value value) {
  float sum = 0.0F;
  for (int64_t i = lane(); i < n; i += kWarp) sum += value(i);
  return join_warp(sum, Plus<float>());
}
template <class Value>
__device__ inline float warp_largest_of(int64_t n, Value value) {
  float largest = -HUGE_VALF;
  for (int64_t i = lane(); i < n; i += kWarp) largest = Largest<float>()(value(i), largest);
  return join_warp(largest, Largest<float>());
}

struct Softmax {
  float largest, sum;

  __device__ float operator()(float x) const { return expf(x - largest) / sum; }
  __device__ float log_sum() const { return largest + logf(sum); }
};
template <class Value>
__device__ inline Softmax softmax_of(int64_t n, Value value) {
  const float largest = warp_largest_of(n, value);
  return {largest, warp_sum_of(n, [=](int64_t i) { return expf(value(i) - largest); })};
}

// The number that scores are divided by. For sigmoids it is their sum plus 1e-20, so that it is never 0.
__device__ inline float divisor(RouterScore score, float sum) { return score == RouterScore::sigmoid ? sum + 1e-20F : sum; }

// The scores that the weights of the chosen experts of a token are made from, before renormalization and scale.
struct ChosenScores {
  const float* from;  // scores or logits
  const int32_t* experts;
  bool softmax;
  Softmax of_logits;

  __device__ ChosenScores(const RoutingRule& rule, const float* logits, const float* scores, const int32_t* chosen)
      : from(rule.softmax_after_topk ? logits : scores), experts(chosen), softmax(rule.softmax_after_topk), of_logits{} {
    const auto value = [this](int64_t j) { return from[experts[j]]; };
    if (softmax) of_logits = softmax_of(rule.top_k, value);
  }
  __device__ float operator()(int64_t j) const { return softmax ? of_logits(from[experts[j]]) : from[experts[j]]; }
};

__device__ inline float weight_sum(const RoutingRule& rule, const ChosenScores& chosen) {
  return rule.renormalize ? divisor(rule.score, warp_sum_of(rule.top_k, chosen)) : 1.0F;
}

}  // namespace mantissa::gpu
