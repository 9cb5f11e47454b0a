// The router: scores and weights from the logits of one token, which a warp has, and their gradients.
#include <bit>

#include "backend/balance_rule.h"
#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/values.h"
#include "mantissa/backend/functions.h"
#include "mantissa/formats/element.h"

namespace mantissa {
namespace {

using namespace gpu;

constexpr int64_t kTokensOfBlock = kThreads / kWarp;

// The sequence of a token: there are fewer than 2^31 of them, and a chip divides 32 bits in a few instructions.
__device__ int64_t sequence_of(int64_t token, int64_t length) { return static_cast<uint32_t>(token) / static_cast<uint32_t>(length); }

// Returns true, in every lane, if a token is padding, which has no expert: all of its logits are -Inf.
__device__ bool is_padding(const float* logits, int64_t width) {
  bool other = false;
  for (int64_t e = lane(); e < width; e += kWarp) other = other || logits[e] != -HUGE_VALF;
  return ballot(other) == 0;
}

// The sum of value(i) for i in [0, n): the same in every lane.
template <class Value>
__device__ float warp_sum_of(int64_t n, Value value) {
  float sum = 0.0F;
  for (int64_t i = lane(); i < n; i += kWarp) sum += value(i);
  return join_warp(sum, Plus<float>());
}

struct Softmax {
  float largest, sum;

  __device__ float operator()(float x) const { return expf(x - largest) / sum; }
  __device__ float log_sum() const { return largest + logf(sum); }
};
template <class Value>
__device__ Softmax softmax_of(int64_t n, Value value) {
  float largest = -HUGE_VALF;
  for (int64_t i = lane(); i < n; i += kWarp) largest = Largest<float>()(value(i), largest);
  largest = join_warp(largest, Largest<float>());
  return {largest, warp_sum_of(n, [=](int64_t i) { return expf(value(i) - largest); })};
}

// The number that scores are divided by. For sigmoids it is their sum plus 1e-20, so that it is never 0.
__device__ float divisor(RouterScore score, float sum) { return score == RouterScore::sigmoid ? sum + 1e-20F : sum; }

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

__device__ float weight_sum(const RoutingRule& rule, const ChosenScores& chosen) {
  return rule.renormalize ? divisor(rule.score, warp_sum_of(rule.top_k, chosen)) : 1.0F;
}

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

// A warp has a token.
__global__ void __launch_bounds__(kThreads) route(Routing k) {
  const int64_t token = block() * kTokensOfBlock + warp(), top_k = k.rule.top_k;
  if (token >= k.tokens) return;
  const float* const logits = k.logits + token * k.width;
  float* const scores = k.scores + token * k.width;
  if (is_padding(logits, k.width)) {  // goes nowhere
    for (int64_t e = lane(); e < k.width; e += kWarp) scores[e] = 0.0F;
    for (int64_t j = token * top_k + lane(); j < (token + 1) * top_k; j += kWarp) k.experts[j] = -1, k.weights[j] = 0.0F;
    return;
  }
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

// tokens [S] = how many each sequence has. A block has a sequence.
__global__ void __launch_bounds__(kThreads) count_tokens(const int32_t* counts, int64_t experts, int64_t top_k, double* tokens) {
  int64_t assignments = 0;
  for (int64_t e = thread(); e < experts; e += kThreads) assignments += counts[block() * experts + e];
  assignments = block_sum(assignments);
  if (thread() == 0) tokens[block()] = static_cast<double>(assignments) / static_cast<double>(top_k);
}

// out [S, E] = the coefficients of P of a sequence's tokens in the sum of both balance losses. A thread has one expert: in a loop over
// more, a division in fp64 would leave a stack.
__global__ void __launch_bounds__(kThreads) balance_coefficients(const int32_t* counts, const double* tokens, int64_t sequences,
                                                                 int64_t experts, BalanceLosses losses, float* out) {
  const int64_t e = block() * kThreads + thread();
  if (e < experts) write_balance_coefficients(counts, tokens, sequences, experts, e, losses, out);
}

struct Gradient {
  const float *logits, *scores, *dweights, *coefficients;
  CheckedIndices experts;
  float* dlogits;
  const double* counted;  // tokens of each sequence without padding
  int64_t tokens, width, tokens_of_sequence, sequences;
  RoutingRule rule;
  double z;
};

// The gradient of the scores that the weights of the chosen experts are made from: that of chosen / sum where they are renormalized.
struct ChosenGradient {
  const float* dweights;
  float factor, mean, sum;

  __device__ ChosenGradient(const RoutingRule& rule, const ChosenScores& chosen, const float* given)
      : dweights(given), factor(static_cast<float>(rule.scale)), mean(0.0F), sum(weight_sum(rule, chosen)) {
    const float divided_by = sum;
    if (rule.renormalize) mean = warp_sum_of(rule.top_k, [=](int64_t j) { return given[j] * (chosen(j) / divided_by); });
  }
  __device__ float operator()(int64_t j) const { return factor * (dweights[j] - mean) / sum; }
};

// The experts of a token differ.
template <class Value>
__device__ void add_at(const int32_t* experts, int64_t count, float* to, Value value) {
  for (int64_t j = lane(); j < count; j += kWarp) to[experts[j]] += value(j);
  warp_barrier();
}

// A warp has a token. First dlogits hold the gradient of its scores, which becomes that of its logits in place.
__global__ void __launch_bounds__(kThreads) route_backward(Gradient k) {
  const int64_t token = block() * kTokensOfBlock + warp(), top_k = k.rule.top_k;
  if (token >= k.tokens) return;
  const float *logits = k.logits + token * k.width, *scores = k.scores + token * k.width;
  if (is_padding(logits, k.width)) {
    for (int64_t e = lane(); e < k.width; e += kWarp) k.dlogits[token * k.width + e] = 0.0F;
    return;
  }
  bool bad = false;  // an expert may not be used
  for (int64_t j = lane(); j < top_k; j += kWarp) bad = checked(k.experts, token * top_k + j) < 0 || bad;
  if (ballot(bad) != 0) return;
  const int32_t* experts = k.experts.values + token * top_k;
  const float* coefficients = k.coefficients + sequence_of(token, k.tokens_of_sequence) * k.width;
  float* d = k.dlogits + token * k.width;
  const bool softmax = k.rule.score == RouterScore::softmax;
  float sum = 1.0F, mean = 0.0F;  // the balance losses have the gradient of P, which for sigmoids is scores / sum
  if (!softmax) {
    sum = divisor(k.rule.score, warp_sum_of(k.width, [=](int64_t e) { return scores[e]; }));
    mean = warp_sum_of(k.width, [=](int64_t e) { return coefficients[e] * scores[e]; }) / sum;
  }
  for (int64_t e = lane(); e < k.width; e += kWarp) d[e] = softmax ? coefficients[e] : (coefficients[e] - mean) / sum;
  warp_barrier();
  const ChosenScores chosen(k.rule, logits, scores, experts);
  const ChosenGradient dchosen(k.rule, chosen, k.dweights + token * top_k);
  if (!k.rule.softmax_after_topk) add_at(experts, top_k, d, dchosen);
  if (softmax) {
    mean = warp_sum_of(k.width, [=](int64_t e) { return scores[e] * d[e]; });
    for (int64_t e = lane(); e < k.width; e += kWarp) d[e] = scores[e] * (d[e] - mean);
  } else {
    for (int64_t e = lane(); e < k.width; e += kWarp) d[e] = d[e] * scores[e] * (1.0F - scores[e]);
  }
  warp_barrier();
  if (k.rule.softmax_after_topk) {
    mean = warp_sum_of(top_k, [=](int64_t j) { return chosen(j) * dchosen(j); });
    add_at(experts, top_k, d, [=](int64_t j) { return chosen(j) * (dchosen(j) - mean); });
  }
  if (k.z == 0.0) return;
  const Softmax of_logits = softmax_of(k.width, [=](int64_t e) { return logits[e]; });
  const float factor = static_cast<float>(2.0 * k.z / CountedSequences(k.counted, k.sequences).tokens) * of_logits.log_sum();
  for (int64_t e = lane(); e < k.width; e += kWarp) d[e] += factor * of_logits(logits[e]);
}

// sums = the numbers that the scores of a token are divided by, log_sums = log-sum-exp of its logits, 0 for padding. A warp has a token.
__global__ void __launch_bounds__(kThreads)
    sum_tokens(const float* logits, const float* scores, int64_t tokens, int64_t width, RouterScore score, float* sums, float* log_sums) {
  const int64_t token = block() * kTokensOfBlock + warp();
  if (token >= tokens) return;
  const float *own_logits = logits + token * width, *own_scores = scores + token * width;
  const float log_sum = is_padding(own_logits, width) ? 0.0F : softmax_of(width, [=](int64_t e) { return own_logits[e]; }).log_sum();
  const float sum = score == RouterScore::softmax ? 1.0F : divisor(score, warp_sum_of(width, [=](int64_t e) { return own_scores[e]; }));
  if (lane() == 0) sums[token] = sum, log_sums[token] = log_sum;
}

constexpr int64_t kTokensOfPiece = 64;

// pieces [S, length / 64 rounded up, E] = the sums of P over tokens of a sequence.
__global__ void __launch_bounds__(kThreads)
    sum_scores(const float* scores, const float* sums, int64_t count, int64_t length, int64_t width, double* pieces) {
  const int64_t of_sequence = ceil_div(length, kTokensOfPiece);
  for_each_element(count, [=](int64_t i) {
    const int64_t e = i % width, piece = i / width, sequence = piece / of_sequence, first = piece % of_sequence * kTokensOfPiece;
    const int64_t end = first + kTokensOfPiece < length ? first + kTokensOfPiece : length;
    double sum = 0.0;
    for (int64_t n = sequence * length + first; n < sequence * length + end; ++n)
      sum += static_cast<double>(scores[n * width + e] / sums[n]);
    pieces[i] = sum;
  });
}

struct Losses {
  const double* pieces;
  const int32_t* counts;
  const float* log_sums;
  const double* counted;  // tokens of each sequence without padding
  int64_t tokens, sequences, of_sequence, width, top_k;
  double* out;
};

// Runs as one block.
__global__ void __launch_bounds__(kThreads) router_losses(Losses k) {
  double balance = 0.0, of_sequences = 0.0, z = 0.0;
  for (int64_t e = thread(); e < k.width; e += kThreads) {
    double all_scores = 0.0, all_counts = 0.0;
    for (int64_t s = 0; s < k.sequences; ++s) {
      const double chosen = k.counts[s * k.width + e];
      double scores = 0.0;
      for (int64_t piece = s * k.of_sequence; piece < (s + 1) * k.of_sequence; ++piece) scores += k.pieces[piece * k.width + e];
      of_sequences += chosen * scores * balance_factor(k.top_k, k.width, k.counted[s]);
      all_scores += scores;
      all_counts += chosen;
    }
    balance += all_counts * all_scores;
  }
  for (int64_t n = thread(); n < k.tokens; n += kThreads) z += static_cast<double>(k.log_sums[n]) * static_cast<double>(k.log_sums[n]);
  balance = block_sum(balance), of_sequences = block_sum(of_sequences), z = block_sum(z);
  if (thread() != 0) return;
  const CountedSequences counted(k.counted, k.sequences);
  const bool any = counted.tokens > 0.0;
  k.out[0] = balance * balance_factor(k.top_k, k.width, counted.tokens);
  k.out[1] = any ? of_sequences / counted.with_tokens : 0.0;
  k.out[2] = any ? z / counted.tokens : 0.0;
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

void CudaBackend::execute(const RouteBackward& k) {
  const int64_t tokens = k.logits.dim(0), experts = k.logits.dim(1), sequences = k.counts.dim(0), length = tokens / sequences;
  if (tokens == 0) return;
  const Tensor coefficients = empty(*this, Dtype::f32, {sequences, experts}), counted = empty(*this, Dtype::f64, {sequences});
  const int32_t* const counts = k.counts.device_data<int32_t>();
  auto* const of_sequences = counted.device_data<double>();
  launch(count_tokens, {sequences, kThreads}, counts, experts, k.rule.top_k, of_sequences);
  launch(balance_coefficients, {ceil_div(experts, kThreads), kThreads}, counts, of_sequences, sequences, experts,
         BalanceLosses{.top_k = k.rule.top_k, .all = k.balance, .of_sequence = k.sequence_balance}, coefficients.device_data<float>());
  launch(route_backward, {ceil_div(tokens, kTokensOfBlock), kThreads},
         Gradient{.logits = k.logits.device_data<float>(),
                  .scores = k.scores.device_data<float>(),
                  .dweights = k.dweights.device_data<float>(),
                  .coefficients = coefficients.device_data<float>(),
                  .experts = checked(k.experts, IndexRule::below(ExitCode::internal, "route backward", "experts", experts)),
                  .dlogits = k.dlogits.device_data<float>(),
                  .counted = of_sequences,
                  .tokens = tokens,
                  .width = experts,
                  .tokens_of_sequence = length,
                  .sequences = sequences,
                  .rule = k.rule,
                  .z = k.z});
}

void CudaBackend::execute(const RouterLosses& k) {
  const int64_t tokens = k.logits.dim(0), experts = k.logits.dim(1), sequences = k.counts.dim(0), length = tokens / sequences;
  if (tokens == 0) return execute(Fill{.out = k.out, .value = 0.0});
  const int64_t of_sequence = ceil_div(length, kTokensOfPiece), pieces = sequences * of_sequence * experts;
  const Tensor sums = empty(*this, Dtype::f32, {2, tokens}), piece_sums = empty(*this, Dtype::f64, {pieces}),
               counted = empty(*this, Dtype::f64, {sequences});
  auto *const divisors = sums.device_data<float>(), *const log_sums = divisors + tokens;
  const float *const logits = k.logits.device_data<float>(), *const scores = k.scores.device_data<float>();
  const int32_t* const counts = k.counts.device_data<int32_t>();
  launch(count_tokens, {sequences, kThreads}, counts, experts, k.rule.top_k, counted.device_data<double>());
  launch(sum_tokens, {ceil_div(tokens, kTokensOfBlock), kThreads}, logits, scores, tokens, experts, k.rule.score, divisors, log_sums);
  launch(sum_scores, {blocks_for(pieces), kThreads}, scores, divisors, pieces, length, experts, piece_sums.device_data<double>());
  launch(router_losses, {1, kThreads},
         Losses{.pieces = piece_sums.device_data<double>(),
                .counts = counts,
                .log_sums = log_sums,
                .counted = counted.device_data<double>(),
                .tokens = tokens,
                .sequences = sequences,
                .of_sequence = of_sequence,
                .width = experts,
                .top_k = k.rule.top_k,
                .out = k.out.device_data<double>()});
}

}  // namespace mantissa
