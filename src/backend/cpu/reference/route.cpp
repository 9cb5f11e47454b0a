#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "backend/cpu/reference/reference.h"
#include "backend/cpu/reference/route_rows.h"
#include "mantissa/base/parallel.h"

namespace mantissa {
namespace {

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

void force(const RoutingRule& rule, int64_t token, int64_t experts, int32_t* chosen) {
  for (int64_t j = 0; j < rule.top_k; ++j) chosen[j] = static_cast<int32_t>((token * rule.top_k + j) % experts);
  std::sort(chosen, chosen + rule.top_k);
}

// A NaN that was not chosen must show in the loss all the same.
template <class S>
void weigh(const RoutingRule& rule, const RouterRow<S>& row, const int32_t* chosen, S* weights) {
  chosen_scores(rule, row, chosen, weights);
  const S factor = static_cast<S>(rule.scale), sum = rule.renormalize ? weight_sum(rule, weights) : S{1};
  const bool bad = std::any_of(row.scores, row.scores + row.experts, [](S score) { return std::isnan(score); });
  for (int64_t j = 0; j < rule.top_k; ++j) weights[j] = bad ? std::numeric_limits<S>::quiet_NaN() : weights[j] / sum * factor;
}

template <class S>
void route_nowhere(const RouteForward& k, int64_t token) {
  const int64_t experts = k.logits.dim(1), top_k = k.rule.top_k;
  std::fill_n(k.scores.device_data<S>() + token * experts, experts, S{0});
  std::fill_n(k.experts.device_data<int32_t>() + token * top_k, top_k, -1);
  std::fill_n(k.weights.device_data<S>() + token * top_k, top_k, S{0});
}

template <class S>
void route(const RouteForward& k) {
  const int64_t experts = k.logits.dim(1), top_k = k.rule.top_k;
  const S* bias = k.bias.defined() ? k.bias.device_data<S>() : nullptr;
  parallel_for(k.logits.dim(0), tokens_per_piece(experts), [&](int64_t begin, int64_t end) {
    Chooser<S> chooser(k.rule, experts);
    for (int64_t n = begin; n < end; ++n) {
      const S* logits = k.logits.device_data<S>() + n * experts;
      if (is_padding(logits, experts)) {
        route_nowhere<S>(k, n);
        continue;
      }
      S* scores = k.scores.device_data<S>() + n * experts;
      int32_t* chosen = k.experts.device_data<int32_t>() + n * top_k;
      score(k.rule.score, logits, experts, scores);
      k.rule.forced ? force(k.rule, n, experts, chosen) : chooser.choose(scores, bias, chosen);
      weigh(k.rule, {.logits = logits, .scores = scores, .experts = experts}, chosen, k.weights.device_data<S>() + n * top_k);
    }
  });
}

void count(const Tensor& experts, const Tensor& counts) {
  const int64_t per_sequence = experts.elements() / counts.dim(0), width = counts.dim(1);
  const int32_t* chosen = experts.device_data<int32_t>();
  int32_t* out = counts.device_data<int32_t>();
  std::fill_n(out, counts.elements(), 0);
  for (int64_t i = 0; i < experts.elements(); ++i) {
    if (chosen[i] >= 0) ++out[i / per_sequence * width + chosen[i]];
  }
}

}  // namespace

void CpuReference::execute(const RouteForward& k) {
  k.logits.dtype() == Dtype::f64 ? route<double>(k) : route<float>(k);
  count(k.experts, k.counts);
}

}  // namespace mantissa
