#include <algorithm>
#include <numeric>
#include <vector>

#include "backend/balance_rule.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/reference/route_rows.h"
#include "backend/index_rule.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

// Returns how many tokens each sequence has.
std::vector<double> tokens_of_sequences(const Tensor& counts, int64_t top_k) {
  const int64_t experts = counts.dim(1);
  std::vector<double> out;
  for (int64_t s = 0; s < counts.dim(0); ++s) {
    const int32_t* const own = counts.device_data<int32_t>() + s * experts;
    out.push_back(static_cast<double>(std::accumulate(own, own + experts, int64_t{0})) / static_cast<double>(top_k));
  }
  return out;
}

// Returns [S, E], the coefficients of P of a sequence's tokens in the sum of both balance losses.
template <class S>
std::vector<S> balance_coefficients(const RouteBackward& k, const std::vector<double>& tokens) {
  const int64_t sequences = k.counts.dim(0), experts = k.counts.dim(1);
  const BalanceLosses losses{.top_k = k.rule.top_k, .all = k.balance, .of_sequence = k.sequence_balance};
  std::vector<S> out(static_cast<size_t>(sequences * experts));
  for (int64_t e = 0; e < experts; ++e)
    write_balance_coefficients(k.counts.device_data<int32_t>(), tokens.data(), sequences, experts, e, losses, out.data());
  return out;
}

// The gradients of one token after the other.
template <class S>
class RouterGradient {
 public:
  // tokens: the number of tokens that the loss of z is averaged over.
  RouterGradient(const RouteBackward& k, const std::vector<S>& coefficients, double tokens)
      : k_(k),
        tokens_(tokens),
        experts_(k.logits.dim(1)),
        coefficients_(coefficients),
        dscores_(static_cast<size_t>(experts_)),
        scratch_(static_cast<size_t>(experts_)),
        chosen_(static_cast<size_t>(k.rule.top_k)),
        dchosen_(chosen_.size()) {}

  void write(int64_t token) {
    const int64_t top_k = k_.rule.top_k;
    const RouterRow<S> row{.logits = k_.logits.device_data<S>() + token * experts_,
                           .scores = k_.scores.device_data<S>() + token * experts_,
                           .experts = experts_};
    const int32_t* experts = k_.experts.device_data<int32_t>() + token * top_k;
    S* dlogits = k_.dlogits.device_data<S>() + token * experts_;
    if (is_padding(row.logits, experts_)) return void(std::fill_n(dlogits, experts_, S{0}));
    from_balance(row, token / (k_.logits.dim(0) / k_.counts.dim(0)));
    from_weights(row, experts, k_.dweights.device_data<S>() + token * top_k);
    if (!k_.rule.softmax_after_topk) add_at(experts, dchosen_.data(), dscores_.data());
    through_scores(row, dlogits);
    if (k_.rule.softmax_after_topk) {
      through_softmax(chosen_.data(), dchosen_.data(), top_k, dchosen_.data());
      add_at(experts, dchosen_.data(), dlogits);
    }
    if (k_.z != 0.0) add_z(row, dlogits);
  }

 private:
  // dscores = the gradient of both balance losses: that of P, which for sigmoids is scores / sum.
  void from_balance(const RouterRow<S>& row, int64_t sequence) {
    const S* c = coefficients_.data() + sequence * experts_;
    if (k_.rule.score == RouterScore::softmax) {
      std::copy_n(c, experts_, dscores_.begin());
      return;
    }
    const S sum = sum_of(k_.rule.score, row.scores, experts_), mean = dot(c, row.scores, experts_) / sum;
    for (int64_t e = 0; e < experts_; ++e) dscores_[static_cast<size_t>(e)] = (c[e] - mean) / sum;
  }

  // chosen = the scores that the weights are made from, dchosen = their gradient: that of chosen / sum where they are renormalized.
  void from_weights(const RouterRow<S>& row, const int32_t* experts, const S* dweights) {
    const int64_t top_k = k_.rule.top_k;
    const S factor = static_cast<S>(k_.rule.scale);
    chosen_scores(k_.rule, row, experts, chosen_.data());
    const S sum = k_.rule.renormalize ? weight_sum(k_.rule, chosen_.data()) : S{1};
    S mean = 0;
    for (int64_t j = 0; k_.rule.renormalize && j < top_k; ++j) mean += dweights[j] * (chosen_[static_cast<size_t>(j)] / sum);
    for (int64_t j = 0; j < top_k; ++j) dchosen_[static_cast<size_t>(j)] = factor * (dweights[j] - mean) / sum;
  }

  void add_at(const int32_t* experts, const S* values, S* to) const {
    for (int64_t j = 0; j < k_.rule.top_k; ++j) to[experts[j]] += values[j];
  }

  // dx of p = softmax(x); dx may be dp.
  static void through_softmax(const S* p, const S* dp, int64_t n, S* dx) {
    const S mean = dot(p, dp, n);
    for (int64_t i = 0; i < n; ++i) dx[i] = p[i] * (dp[i] - mean);
  }

  void through_scores(const RouterRow<S>& row, S* dlogits) const {
    if (k_.rule.score == RouterScore::softmax) return through_softmax(row.scores, dscores_.data(), experts_, dlogits);
    for (int64_t e = 0; e < experts_; ++e) dlogits[e] = dscores_[static_cast<size_t>(e)] * row.scores[e] * (S{1} - row.scores[e]);
  }

  void add_z(const RouterRow<S>& row, S* dlogits) {
    const S log_sum = softmax(row.logits, experts_, scratch_.data());
    const S factor = static_cast<S>(2.0 * k_.z / tokens_) * log_sum;
    for (int64_t e = 0; e < experts_; ++e) dlogits[e] += factor * scratch_[static_cast<size_t>(e)];
  }

  const RouteBackward& k_;
  double tokens_;
  int64_t experts_;
  const std::vector<S>& coefficients_;
  std::vector<S> dscores_, scratch_, chosen_, dchosen_;
};

// Only padding has no experts.
template <class S>
void check_experts(const RouteBackward& k) {
  const int64_t experts = k.logits.dim(1), top_k = k.rule.top_k;
  const IndexRule rule = IndexRule::below(ExitCode::internal, "route backward", "experts", experts);
  const int32_t* const chosen = k.experts.device_data<int32_t>();
  for (int64_t i = 0; i < k.experts.elements(); ++i) {
    if (!rule.allows(chosen[i]) && !is_padding(k.logits.device_data<S>() + i / top_k * experts, experts)) rule.refuse(i, chosen[i]);
  }
}

template <class S>
void route_backward(const RouteBackward& k) {
  check_experts<S>(k);
  const std::vector<double> tokens = tokens_of_sequences(k.counts, k.rule.top_k);
  const std::vector<S> coefficients = balance_coefficients<S>(k, tokens);
  parallel_for(k.logits.dim(0), tokens_per_piece(k.logits.dim(1)), [&](int64_t begin, int64_t end) {
    RouterGradient<S> gradient(k, coefficients, CountedSequences(tokens.data(), std::ssize(tokens)).tokens);
    for (int64_t n = begin; n < end; ++n) gradient.write(n);
  });
}

// log-sum-exp of every token's logits; 0 of padding.
template <class S>
std::vector<S> log_sums(const Tensor& logits) {
  const int64_t experts = logits.dim(1);
  std::vector<S> out(static_cast<size_t>(logits.dim(0)));
  parallel_for(logits.dim(0), tokens_per_piece(experts), [&](int64_t begin, int64_t end) {
    std::vector<S> scratch(static_cast<size_t>(experts));
    for (int64_t n = begin; n < end; ++n) {
      const S* const own = logits.device_data<S>() + n * experts;
      out[static_cast<size_t>(n)] = is_padding(own, experts) ? S{0} : softmax(own, experts, scratch.data());
    }
  });
  return out;
}

// [E]: P of the tokens of one sequence, added up.
template <class S>
std::vector<double> summed_scores(const RouterLosses& k, int64_t sequence) {
  const int64_t experts = k.scores.dim(1), length = k.scores.dim(0) / k.counts.dim(0);
  std::vector<double> out(static_cast<size_t>(experts));
  for (int64_t n = sequence * length; n < (sequence + 1) * length; ++n) {
    const S* scores = k.scores.device_data<S>() + n * experts;
    const S sum = k.rule.score == RouterScore::softmax ? S{1} : sum_of(k.rule.score, scores, experts);
    for (int64_t e = 0; e < experts; ++e) out[static_cast<size_t>(e)] += static_cast<double>(scores[e] / sum);
  }
  return out;
}

template <class S>
void losses(const RouterLosses& k) {
  const int64_t experts = k.scores.dim(1), sequences = k.counts.dim(0), top_k = k.rule.top_k;
  const int32_t* counts = k.counts.device_data<int32_t>();
  const std::vector<double> tokens = tokens_of_sequences(k.counts, top_k);
  const CountedSequences counted(tokens.data(), sequences);
  std::vector<double> all_scores(static_cast<size_t>(experts)), all_counts(static_cast<size_t>(experts));
  double balance = 0.0, of_sequences = 0.0, z = 0.0;
  for (int64_t s = 0; s < sequences; ++s) {
    const std::vector<double> scores = summed_scores<S>(k, s);
    double own = 0.0;
    for (size_t e = 0; e < scores.size(); ++e) {
      const double chosen = static_cast<double>(counts[s * experts + static_cast<int64_t>(e)]);
      own += chosen * scores[e];
      all_scores[e] += scores[e];
      all_counts[e] += chosen;
    }
    of_sequences += own * balance_factor(top_k, experts, tokens[static_cast<size_t>(s)]);
  }
  for (size_t e = 0; e < all_scores.size(); ++e) balance += all_counts[e] * all_scores[e];
  for (const S log_sum : log_sums<S>(k.logits)) z += static_cast<double>(log_sum) * static_cast<double>(log_sum);
  double* out = k.out.device_data<double>();
  const bool any = counted.tokens > 0.0;
  out[0] = balance * balance_factor(top_k, experts, counted.tokens);
  out[1] = any ? of_sequences / counted.with_tokens : 0.0;
  out[2] = any ? z / counted.tokens : 0.0;
}

}  // namespace

void CpuReference::execute(const RouteBackward& k) {
  k.logits.dtype() == Dtype::f64 ? route_backward<double>(k) : route_backward<float>(k);
}

void CpuReference::execute(const RouterLosses& k) {
  if (k.logits.dim(0) == 0) return run(Fill{.out = k.out, .value = 0.0});
  k.logits.dtype() == Dtype::f64 ? losses<double>(k) : losses<float>(k);
}

}  // namespace mantissa
