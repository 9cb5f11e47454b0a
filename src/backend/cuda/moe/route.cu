#include <bit>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/moe/route.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/element.h"

namespace mantissa {
namespace {

using namespace gpu;

struct Routing {
  const float *logits, *bias;  // bias may be null
  int32_t *experts, *counts;
  float *weights, *scores, *group_values;  // the last [N, groups], where there are groups
  int64_t tokens, width, tokens_of_sequence;
  RoutingRule rule;
};

__device__ bool is_nan(float value) { return (__builtin_bit_cast(uint32_t, value) & ~kFp32Sign) > kFp32Inf; }

// Larger is better, and never 0: NaN below everything, ties to the lowest index. No value is -0: no score is, and so no sum with one.
__device__ uint64_t rank_of(float value, int64_t index) {
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t order = is_nan(value) ? 0U : (bits & kFp32Sign) != 0 ? ~bits : bits | kFp32Sign;
  return uint64_t{order} << 32 | (~uint32_t{0} - static_cast<uint32_t>(index));
}
__device__ int64_t index_of(uint64_t rank) { return ~uint32_t{0} - static_cast<uint32_t>(rank); }

// The rank that `count` indices of [0, n) reach, in every lane. rank(i) is 0 where i is not to be chosen.
template <class Rank>
__device__ uint64_t lowest_of_best(int64_t n, int64_t count, Rank rank) {
  uint64_t last = ~uint64_t{0};
  for (int64_t found = 0; found < count; ++found) {
    uint64_t best = 0;
    for (int64_t i = lane(); i < n; i += kWarp) {
      const uint64_t own = rank(i);
      if (own < last) best = Largest<uint64_t>()(best, own);
    }
    last = join_warp(best, Largest<uint64_t>());
  }
  return last;
}

// The sum of the best `count` of [begin, end), best first. A lane has a group.
template <class Value>
__device__ float sum_of_best(int64_t begin, int64_t end, int64_t count, Value value) {
  uint64_t last = ~uint64_t{0};
  float sum = 0.0F;
  for (int64_t found = 0; found < count; ++found) {
    uint64_t best = 0;
    for (int64_t e = begin; e < end; ++e) {
      const uint64_t own = rank_of(value(e), e);
      if (own < last) best = Largest<uint64_t>()(best, own);
    }
    sum += value(index_of(best));
    last = best;
  }
  return sum;
}

// Writes the scores of a token. Returns whether one is NaN.
__device__ bool score(const Routing& k, const float* logits, float* scores) {
  const bool softmax = k.rule.score == RouterScore::softmax;
  const Softmax of_logits = softmax ? softmax_of(k.width, [=](int64_t e) { return logits[e]; }) : Softmax{};
  bool bad = false;
  for (int64_t e = lane(); e < k.width; e += kWarp) {
    const float own = softmax ? of_logits(logits[e]) : 1.0F / (1.0F + expf(-logits[e]));
    scores[e] = own;
    bad = bad || is_nan(own);
  }
  warp_barrier();
  return ballot(bad) != 0;
}

// Writes in ascending order those of [0, width) of which chosen(e) is true, and counts them.
template <class Chosen>
__device__ void write_chosen(const Routing& k, int64_t token, Chosen chosen) {
  int32_t* const experts = k.experts + token * k.rule.top_k;
  auto* const counts = reinterpret_cast<uint32_t*>(k.counts) + sequence_of(token, k.tokens_of_sequence) * k.width;
  int64_t before = 0;
  for (int64_t first = 0; first < k.width; first += kWarp) {
    const int64_t e = first + lane();
    const bool own = e < k.width && chosen(e);
    const unsigned lanes = ballot(own);
    if (own) {
      experts[before + std::popcount(lanes & ((1U << lane()) - 1U))] = static_cast<int32_t>(e);
      fetch_add(counts + e, 1);
    }
    before += std::popcount(lanes);
  }
  warp_barrier();
}

__device__ void choose(const Routing& k, int64_t token, const float* scores) {
  const auto value = [&](int64_t e) { return k.bias == nullptr ? scores[e] : scores[e] + k.bias[e]; };
  if (k.rule.groups == 1) {
    const uint64_t lowest = lowest_of_best(k.width, k.rule.top_k, [&](int64_t e) { return rank_of(value(e), e); });
    return write_chosen(k, token, [&](int64_t e) { return rank_of(value(e), e) >= lowest; });
  }
  const int64_t size = k.width / k.rule.groups, of_group = k.rule.top_k / k.rule.groups_kept;
  float* const groups = k.group_values + token * k.rule.groups;
  for (int64_t g = lane(); g < k.rule.groups; g += kWarp)
    groups[g] = sum_of_best(g * size, (g + 1) * size, of_group > 1 ? of_group : 1, value);
  warp_barrier();
  const uint64_t lowest_group = lowest_of_best(k.rule.groups, k.rule.groups_kept, [&](int64_t g) { return rank_of(groups[g], g); });
  const auto rank = [&](int64_t e) {
    const int64_t group = static_cast<uint32_t>(e) / static_cast<uint32_t>(size);
    return rank_of(groups[group], group) >= lowest_group ? rank_of(value(e), e) : 0;
  };
  const uint64_t lowest = lowest_of_best(k.width, k.rule.top_k, rank);
  write_chosen(k, token, [&](int64_t e) { return rank(e) >= lowest; });
}

__device__ void route_nowhere(const Routing& k, int64_t token) {
  for (int64_t e = lane(); e < k.width; e += kWarp) k.scores[token * k.width + e] = 0.0F;
  for (int64_t j = token * k.rule.top_k + lane(); j < (token + 1) * k.rule.top_k; j += kWarp) k.experts[j] = -1, k.weights[j] = 0.0F;
}

// A warp has a token.
__global__ void __launch_bounds__(kThreads) route(Routing k) {
  const int64_t token = block() * kTokensOfBlock + warp(), top_k = k.rule.top_k;
  if (token >= k.tokens) return;
  const float* const logits = k.logits + token * k.width;
  if (is_padding(logits, k.width)) return route_nowhere(k, token);
  float* const scores = k.scores + token * k.width;
  const bool bad = score(k, logits, scores);
  if (k.rule.forced) {
    const int64_t first = token * top_k % k.width;
    write_chosen(k, token, [=](int64_t e) { return (e >= first ? e - first : e - first + k.width) < top_k; });
  } else {
    choose(k, token, scores);
  }
  const ChosenScores chosen(k.rule, logits, scores, k.experts + token * top_k);
  const float sum = weight_sum(k.rule, chosen), factor = static_cast<float>(k.rule.scale);
  for (int64_t j = lane(); j < top_k; j += kWarp)
    k.weights[token * top_k + j] = bad ? __builtin_bit_cast(float, kFp32Nan) : chosen(j) / sum * factor;
}

}  // namespace

void CudaBackend::execute(const RouteForward& k) {
  const int64_t tokens = k.logits.dim(0);
  execute(Fill{.out = k.counts, .value = 0.0});
  const Tensor group_values = empty(*this, Dtype::f32, {k.rule.groups > 1 ? tokens * k.rule.groups : 0});
  launch(route, {ceil_div(tokens, kTokensOfBlock), kThreads},
         Routing{.logits = k.logits.device_data<float>(),
                 .bias = data_or_null<float>(k.bias),
                 .experts = k.experts.device_data<int32_t>(),
                 .counts = k.counts.device_data<int32_t>(),
                 .weights = k.weights.device_data<float>(),
                 .scores = k.scores.device_data<float>(),
                 .group_values = group_values.device_data<float>(),
                 .tokens = tokens,
                 .width = k.logits.dim(1),
                 .tokens_of_sequence = tokens / k.counts.dim(0),
                 .rule = k.rule});
}

}  // namespace mantissa
