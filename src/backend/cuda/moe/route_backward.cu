#include "backend/balance_rule.h"
#include "backend/cuda/checked_index.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/moe/route.h"
#include "mantissa/backend/functions.h"

namespace mantissa {
namespace {

using namespace gpu;

// tokens [S] = how many each sequence has. A block has a sequence.
__global__ void __launch_bounds__(kThreads) count_tokens(const int32_t* counts, int64_t experts, int64_t top_k, double* tokens) {
  int64_t assignments = 0;
  for (int64_t e = thread(); e < experts; e += kThreads) assignments += counts[block() * experts + e];
  assignments = block_sum(assignments);
  if (thread() == 0) tokens[block()] = static_cast<double>(assignments) / static_cast<double>(top_k);
}

// out [S, E] = the coefficients of P of a sequence's tokens in the sum of both balance losses.
__global__ void __launch_bounds__(kThreads) balance_coefficients(const int32_t* counts, const double* tokens, int64_t sequences,
                                                                 int64_t experts, BalanceLosses losses, float* out) {
  for_each_element(experts, [=](int64_t e) { write_balance_coefficients(counts, tokens, sequences, experts, e, losses, out); });
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

// d = the gradient of both balance losses by the scores: that of P, which for sigmoids is scores / sum.
__device__ void from_balance(const Gradient& k, const float* scores, const float* coefficients, float* d) {
  const bool softmax = k.rule.score == RouterScore::softmax;
  float sum = 1.0F, mean = 0.0F;
  if (!softmax) {
    sum = divisor(k.rule.score, warp_sum_of(k.width, [=](int64_t e) { return scores[e]; }));
    mean = warp_sum_of(k.width, [=](int64_t e) { return coefficients[e] * scores[e]; }) / sum;
  }
  for (int64_t e = lane(); e < k.width; e += kWarp) d[e] = softmax ? coefficients[e] : (coefficients[e] - mean) / sum;
  warp_barrier();
}

// The experts of a token differ.
template <class Value>
__device__ void add_at(const int32_t* experts, int64_t count, float* to, Value value) {
  for (int64_t j = lane(); j < count; j += kWarp) to[experts[j]] += value(j);
  warp_barrier();
}

// Makes the gradient of the scores that of the logits.
__device__ void through_scores(const Gradient& k, const float* scores, float* d) {
  if (k.rule.score == RouterScore::softmax) {
    const float mean = warp_sum_of(k.width, [=](int64_t e) { return scores[e] * d[e]; });
    for (int64_t e = lane(); e < k.width; e += kWarp) d[e] = scores[e] * (d[e] - mean);
  } else {
    for (int64_t e = lane(); e < k.width; e += kWarp) d[e] = d[e] * scores[e] * (1.0F - scores[e]);
  }
  warp_barrier();
}

// Returns true, in every lane, if all experts of a token may be used.
__device__ bool usable(const Gradient& k, int64_t token) {
  bool bad = false;
  for (int64_t j = lane(); j < k.rule.top_k; j += kWarp) bad = checked(k.experts, token * k.rule.top_k + j) < 0 || bad;
  return ballot(bad) == 0;
}

// A warp has a token. Its gradient of the scores becomes that of the logits where it lies.
__global__ void __launch_bounds__(kThreads) route_backward(Gradient k) {
  const int64_t token = block() * kTokensOfBlock + warp(), top_k = k.rule.top_k;
  if (token >= k.tokens) return;
  const float *logits = k.logits + token * k.width, *scores = k.scores + token * k.width;
  if (is_padding(logits, k.width)) {
    for (int64_t e = lane(); e < k.width; e += kWarp) k.dlogits[token * k.width + e] = 0.0F;
    return;
  }
  if (!usable(k, token)) return;
  const int32_t* experts = k.experts.values + token * top_k;
  float* d = k.dlogits + token * k.width;
  from_balance(k, scores, k.coefficients + sequence_of(token, k.tokens_of_sequence) * k.width, d);
  const ChosenScores chosen(k.rule, logits, scores, experts);
  const ChosenGradient dchosen(k.rule, chosen, k.dweights + token * top_k);
  if (!k.rule.softmax_after_topk) add_at(experts, top_k, d, dchosen);
  through_scores(k, scores, d);
  if (k.rule.softmax_after_topk) {
    const float mean = warp_sum_of(top_k, [=](int64_t j) { return chosen(j) * dchosen(j); });
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

void CudaBackend::execute(const RouteBackward& k) {
  const int64_t tokens = k.logits.dim(0), experts = k.logits.dim(1), sequences = k.counts.dim(0), length = tokens / sequences;
  if (tokens == 0) return;
  const Tensor coefficients = empty(*this, Dtype::f32, {sequences, experts}), counted = empty(*this, Dtype::f64, {sequences});
  const int32_t* const counts = k.counts.device_data<int32_t>();
  auto* const of_sequences = counted.device_data<double>();
  launch(count_tokens, {sequences, kThreads}, counts, experts, k.rule.top_k, of_sequences);
  launch(balance_coefficients, {blocks_for(experts), kThreads}, counts, of_sequences, sequences, experts,
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
