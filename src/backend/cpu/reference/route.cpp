#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/balance_rule.h"
#include "backend/cpu/pieces.h"
#include "backend/cpu/reference/reference.h"
#include "backend/cpu/scalar.h"
#include "backend/index_rule.h"
#include "base/parallel.h"
#include "mantissa/backend/backend.h"
#include "mantissa/base/integers.h"

namespace mantissa {
namespace {

// Scores and weights that the router makes from the logits of one token, for its forward and backward. fp32 or fp64, every sum in order.

// Tokens of a piece of parallel work: an exponential for every expert.
int64_t tokens_per_piece(int64_t experts) { return std::max<int64_t>(1, 4096 / experts); }

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

// Chooses the experts of one token after the other.
template <class S>
class Chooser {
 public:
  Chooser(const RoutingRule& rule, int64_t experts)
      : rule_(rule), values_(static_cast<size_t>(experts)), group_values_(static_cast<size_t>(rule.groups)) {}

  // bias may be null.
  void choose(const S* scores, const S* bias, int32_t* chosen) {
    for (size_t e = 0; e < values_.size(); ++e) values_[e] = bias == nullptr ? scores[e] : scores[e] + bias[e];
    candidates_.clear();
    rule_.groups > 1 ? add_best_groups() : add_range(0, std::ssize(values_));
    take_best(candidates_, values_, rule_.top_k);
    std::copy_n(candidates_.begin(), rule_.top_k, chosen);
    std::sort(chosen, chosen + rule_.top_k);
  }

 private:
  // Moves the best `count` of `indices` to the front, best first: NaN below everything, ties to the lowest index.
  static void take_best(std::vector<int32_t>& indices, const std::vector<S>& values, int64_t count) {
    const auto better = [&](int32_t a, int32_t b) {
      const S x = values[static_cast<size_t>(a)], y = values[static_cast<size_t>(b)];
      if (std::isnan(x) != std::isnan(y)) return std::isnan(y);
      return x > y || (!(x < y) && a < b);
    };
    std::partial_sort(indices.begin(), indices.begin() + count, indices.end(), better);
  }

  void add_range(int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) candidates_.push_back(static_cast<int32_t>(e));
  }

  void add_best_groups() {
    const int64_t size = std::ssize(values_) / rule_.groups, best = std::max<int64_t>(1, rule_.top_k / rule_.groups_kept);
    for (int64_t g = 0; g < rule_.groups; ++g) {
      candidates_.clear();
      add_range(g * size, (g + 1) * size);
      take_best(candidates_, values_, best);
      S sum = 0;
      for (int64_t i = 0; i < best; ++i) sum += values_[static_cast<size_t>(candidates_[static_cast<size_t>(i)])];
      group_values_[static_cast<size_t>(g)] = sum;
    }
    groups_.resize(group_values_.size());
    std::iota(groups_.begin(), groups_.end(), 0);
    take_best(groups_, group_values_, rule_.groups_kept);
    candidates_.clear();
    for (int64_t i = 0; i < rule_.groups_kept; ++i) {
      const int64_t g = groups_[static_cast<size_t>(i)];
      add_range(g * size, (g + 1) * size);
    }
  }

  const RoutingRule& rule_;
  std::vector<S> values_, group_values_;
  std::vector<int32_t> candidates_, groups_;
};

// A NaN that was not chosen must show in the loss all the same.
template <class S>
void weigh(const RoutingRule& rule, const RouterRow<S>& row, const int32_t* chosen, S* weights) {
  chosen_scores(rule, row, chosen, weights);
  const S factor = static_cast<S>(rule.scale), sum = rule.renormalize ? sum_of(rule.score, weights, rule.top_k) : S{1};
  const bool bad = std::any_of(row.scores, row.scores + row.experts, [](S score) { return std::isnan(score); });
  for (int64_t j = 0; j < rule.top_k; ++j) weights[j] = bad ? std::numeric_limits<S>::quiet_NaN() : weights[j] / sum * factor;
}

template <class S>
void route(const RouteForward& k) {
  const int64_t experts = k.logits.dim(1), top_k = k.rule.top_k;
  const S* bias = k.bias.defined() ? k.bias.device_data<S>() : nullptr;
  parallel_for(k.logits.dim(0), tokens_per_piece(experts), [&](int64_t begin, int64_t end) {
    Chooser<S> chooser(k.rule, experts);
    for (int64_t n = begin; n < end; ++n) {
      const S* logits = k.logits.device_data<S>() + n * experts;
      S *scores = k.scores.device_data<S>() + n * experts, *weights = k.weights.device_data<S>() + n * top_k;
      int32_t* chosen = k.experts.device_data<int32_t>() + n * top_k;
      if (is_padding(logits, experts)) {
        std::fill_n(scores, experts, S{0});
        std::fill_n(chosen, top_k, -1);
        std::fill_n(weights, top_k, S{0});
        continue;
      }
      score(k.rule.score, logits, experts, scores);
      if (k.rule.forced) {
        for (int64_t j = 0; j < top_k; ++j) chosen[j] = static_cast<int32_t>((n * top_k + j) % experts);
        std::sort(chosen, chosen + top_k);
      } else {
        chooser.choose(scores, bias, chosen);
      }
      weigh(k.rule, {.logits = logits, .scores = scores, .experts = experts}, chosen, weights);
    }
  });
}

}  // namespace

void CpuReference::execute(const RouteForward& k) {
  k.logits.dtype() == Dtype::f64 ? route<double>(k) : route<float>(k);
  const int64_t per_sequence = k.experts.elements() / k.counts.dim(0), width = k.counts.dim(1);
  const int32_t* chosen = k.experts.device_data<int32_t>();
  int32_t* out = k.counts.device_data<int32_t>();
  std::fill_n(out, k.counts.elements(), 0);
  for (int64_t i = 0; i < k.experts.elements(); ++i) {
    if (chosen[i] >= 0) ++out[i / per_sequence * width + chosen[i]];
  }
}

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

// The gradients of one token after the other.
template <class S>
class RouterGradient {
 public:
  // coefficients [S, E] are those of P of a sequence's tokens in the sum of both balance losses; tokens is the number of tokens that the
  // loss of z is averaged over.
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
    if (k_.rule.score == RouterScore::softmax) {
      through_softmax(row.scores, dscores_.data(), experts_, dlogits);
    } else {
      for (int64_t e = 0; e < experts_; ++e) dlogits[e] = dscores_[static_cast<size_t>(e)] * row.scores[e] * (S{1} - row.scores[e]);
    }
    if (k_.rule.softmax_after_topk) {
      through_softmax(chosen_.data(), dchosen_.data(), top_k, dchosen_.data());
      add_at(experts, dchosen_.data(), dlogits);
    }
    if (k_.z == 0.0) return;
    const S log_sum = softmax(row.logits, experts_, scratch_.data());
    const S factor = static_cast<S>(2.0 * k_.z / tokens_) * log_sum;
    for (int64_t e = 0; e < experts_; ++e) dlogits[e] += factor * scratch_[static_cast<size_t>(e)];
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
    const S sum = k_.rule.renormalize ? sum_of(k_.rule.score, chosen_.data(), top_k) : S{1};
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

  const RouteBackward& k_;
  double tokens_;
  int64_t experts_;
  const std::vector<S>& coefficients_;
  std::vector<S> dscores_, scratch_, chosen_, dchosen_;
};

template <class S>
void route_backward(const RouteBackward& k) {
  const int64_t experts = k.logits.dim(1), sequences = k.counts.dim(0), top_k = k.rule.top_k;
  const IndexRule rule = IndexRule::below(ExitCode::internal, "route backward", "experts", experts);
  const int32_t* const chosen = k.experts.device_data<int32_t>();
  for (int64_t i = 0; i < k.experts.elements(); ++i) {  // only padding has no experts
    if (!rule.allows(chosen[i]) && !is_padding(k.logits.device_data<S>() + i / top_k * experts, experts)) rule.refuse(i, chosen[i]);
  }
  const std::vector<double> tokens = tokens_of_sequences(k.counts, top_k);
  const BalanceLosses losses{.top_k = top_k, .all = k.balance, .of_sequence = k.sequence_balance};
  std::vector<S> coefficients(static_cast<size_t>(sequences * experts));
  for (int64_t e = 0; e < experts; ++e)
    write_balance_coefficients(k.counts.device_data<int32_t>(), tokens.data(), sequences, experts, e, losses, coefficients.data());
  parallel_for(k.logits.dim(0), tokens_per_piece(experts), [&](int64_t begin, int64_t end) {
    RouterGradient<S> gradient(k, coefficients, CountedSequences(tokens.data(), sequences).tokens);
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

template <class S>
void losses(const RouterLosses& k) {
  const int64_t experts = k.scores.dim(1), sequences = k.counts.dim(0), length = k.scores.dim(0) / sequences, top_k = k.rule.top_k;
  const int32_t* counts = k.counts.device_data<int32_t>();
  const std::vector<double> tokens = tokens_of_sequences(k.counts, top_k);
  const CountedSequences counted(tokens.data(), sequences);
  std::vector<double> all_scores(static_cast<size_t>(experts)), all_counts(static_cast<size_t>(experts));
  double balance = 0.0, of_sequences = 0.0, z = 0.0;
  for (int64_t s = 0; s < sequences; ++s) {
    std::vector<double> scores(static_cast<size_t>(experts));  // P of the tokens of this sequence, added up
    for (int64_t n = s * length; n < (s + 1) * length; ++n) {
      const S* row = k.scores.device_data<S>() + n * experts;
      const S sum = k.rule.score == RouterScore::softmax ? S{1} : sum_of(k.rule.score, row, experts);
      for (int64_t e = 0; e < experts; ++e) scores[static_cast<size_t>(e)] += static_cast<double>(row[e] / sum);
    }
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

namespace {

// Copies the bytes of rows of `x` to rows of `out`.
void permute_rows(const Tensor& x, const Tensor& out, const Permute& k) {
  const int64_t bytes = out.dim(1) * dtype_bytes(out.dtype()), held = x.dim(0);
  const int32_t* assignments = k.assignments.device_data<int32_t>();
  parallel_for(out.dim(0), rows_per_piece(bytes / 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      std::byte* to = out.device_bytes() + r * bytes;
      const int64_t row = assignments[r] < 0 ? -1 : assignments[r] / k.per_row - k.part.first;
      if (row < 0 || row >= held) {
        std::memset(to, 0, static_cast<size_t>(bytes));
      } else {
        std::memcpy(to, x.device_bytes() + row * bytes, static_cast<size_t>(bytes));
      }
    }
  });
}

}  // namespace

void CpuReference::execute(const DispatchTable& k) {
  const int64_t groups = k.offsets.elements() - 1, total = k.experts.elements();
  check_indices(k.experts, IndexRule::optional("dispatch_table", "experts", groups));
  const int32_t* experts = k.experts.device_data<int32_t>();
  int32_t *offsets = k.offsets.device_data<int32_t>(), *rows = k.rows.device_data<int32_t>(),
          *assignments = k.assignments.device_data<int32_t>();
  std::vector<int32_t> kept(static_cast<size_t>(groups));
  for (int64_t i = 0; i < total; ++i) {  // rows: the place within the group
    if (experts[i] < 0) {
      rows[i] = -1;
      continue;
    }
    int32_t& count = kept[static_cast<size_t>(experts[i])];
    rows[i] = k.capacity > 0 && count == k.capacity ? -1 : count++;
  }
  offsets[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    offsets[g + 1] = offsets[g] + static_cast<int32_t>(round_up(int64_t{kept[static_cast<size_t>(g)]}, k.multiple));
  }
  std::fill_n(assignments, k.assignments.elements(), -1);
  for (int64_t i = 0; i < total; ++i) {
    if (rows[i] < 0) continue;
    rows[i] += offsets[experts[i]];
    assignments[rows[i]] = static_cast<int32_t>(i);
  }
}

void CpuReference::execute(const ArrivalTable& k) {
  const int64_t ranks = k.counts.dim(0), experts = k.counts.dim(1);
  const int32_t* counts = k.counts.device_data<int32_t>();
  int32_t *offsets = k.offsets.device_data<int32_t>(), *rows = k.rows.device_data<int32_t>(),
          *assignments = k.assignments.device_data<int32_t>();
  int32_t* const sources = k.source_offsets.defined() ? k.source_offsets.device_data<int32_t>() : nullptr;
  const ArrivalRules rules(k);
  std::vector<int64_t> first(static_cast<size_t>(ranks * experts));  // as they arrive
  int64_t arrived = 0, rounded = 0, row = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    rules.counts.check(static_cast<int64_t>(i), counts[i]);
    first[i] = std::exchange(arrived, arrived + counts[i]);
    rounded += round_up(int64_t{counts[i]}, k.multiple);
  }
  rules.arrivals.check(0, arrived);
  rules.room.check(0, rounded);
  std::fill_n(assignments, k.assignments.elements(), -1);
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e] = static_cast<int32_t>(row);
    for (int64_t r = 0; r < ranks; ++r) {
      const int64_t count = counts[r * experts + e], arrival = first[static_cast<size_t>(r * experts + e)];
      if (sources) sources[e * ranks + r] = static_cast<int32_t>(row);
      for (int64_t i = 0; i < count; ++i) {
        rows[arrival + i] = static_cast<int32_t>(row + i);
        assignments[row + i] = static_cast<int32_t>(arrival + i);
      }
      row += round_up(count, k.multiple);
    }
  }
  offsets[experts] = static_cast<int32_t>(row);
  if (sources) sources[experts * ranks] = static_cast<int32_t>(row);
}

void CpuReference::execute(const SumCounts& k) {
  const int64_t columns = k.out.elements();
  const int32_t* counts = k.counts.device_data<int32_t>();
  double* out = k.out.device_data<double>();
  for (int64_t c = 0; c < columns; ++c) {
    int64_t sum = 0;
    for (int64_t i = c; i < k.counts.elements(); i += columns) sum += counts[i];
    out[c] = static_cast<double>(sum);
  }
}

void CpuReference::execute(const Permute& k) {
  check_indices(k.assignments, rule_of(k));
  if (const auto* x = std::get_if<Tensor>(&k.x)) return permute_rows(*x, std::get<Tensor>(k.out), k);
  const auto &from = std::get<QuantizedTensor>(k.x), &to = std::get<QuantizedTensor>(k.out);
  permute_rows(from.codes, to.codes, k);
  permute_rows(from.scales, to.scales, k);
}

void CpuReference::execute(const Unpermute& k) {
  check_indices(k.rows, IndexRule::optional("unpermute", "rows", k.x.dim(0)));
  with_values(k.x.dtype(), [&]<class T>() {
    using S = Arithmetic<T>;
    const int64_t columns = k.out.dim(1), assignments = k.rows.dim(1);
    std::vector<S> sums(static_cast<size_t>(columns));
    for (int64_t n = 0; n < k.out.dim(0); ++n) {
      std::fill(sums.begin(), sums.end(), S{0});
      for (int64_t j = 0; j < assignments; ++j) {
        const int64_t row = k.rows.device_data<int32_t>()[n * assignments + j];
        if (row < 0) continue;
        const T* x = k.x.device_data<T>() + row * columns;
        for (size_t c = 0; c < sums.size(); ++c) sums[c] += load(x[c]);
      }
      T* out = k.out.device_data<T>() + n * columns;
      for (size_t c = 0; c < sums.size(); ++c) out[c] = store<T>(sums[c]);
    }
  });
}

}  // namespace mantissa
