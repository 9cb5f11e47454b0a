// The router: its assignments, weights and losses against a plain definition in fp64, its gradients against central differences.
#include <cmath>
#include <limits>
#include <numeric>

#include "contract_check.h"
#include "gemm_shapes.h"
#include "kernel_cases_moe.h"

namespace mantissa::test::moe_route_test {

struct Routed {
  std::vector<double> scores, weights;
  std::vector<int> experts;
};

double sum_of(const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0); }

std::vector<double> softmax_of(std::vector<double> x) {
  const double largest = *std::max_element(x.begin(), x.end());
  for (double& value : x) value = std::exp(value - largest);
  const double sum = sum_of(x);
  for (double& value : x) value /= sum;
  return x;
}

// The indices of the largest values, ties to the lowest.
std::vector<int> largest_of(const std::vector<double>& values, const std::vector<int>& among, int64_t count) {
  std::vector<int> out = among;
  std::stable_sort(out.begin(), out.end(), [&](int a, int b) { return values[static_cast<size_t>(a)] > values[static_cast<size_t>(b)]; });
  out.resize(static_cast<size_t>(count));
  return out;
}

std::vector<int> range(int64_t begin, int64_t end) {
  std::vector<int> out(static_cast<size_t>(end - begin));
  std::iota(out.begin(), out.end(), static_cast<int>(begin));
  return out;
}

std::vector<int> chosen_by(const RoutingRule& rule, const std::vector<double>& values) {
  const int64_t size = std::ssize(values) / rule.groups;
  std::vector<double> group_values;
  for (int64_t g = 0; g < rule.groups; ++g) {
    double sum = 0.0;
    for (const int e : largest_of(values, range(g * size, (g + 1) * size), rule.top_k / rule.groups_kept)) {
      sum += values[static_cast<size_t>(e)];
    }
    group_values.push_back(sum);
  }
  std::vector<int> among;
  std::vector<int> kept = largest_of(group_values, range(0, rule.groups), rule.groups_kept);
  std::sort(kept.begin(), kept.end());
  for (const int g : kept) {
    for (const int e : range(g * size, (g + 1) * size)) among.push_back(e);
  }
  std::vector<int> out = largest_of(values, among, rule.top_k);
  std::sort(out.begin(), out.end());
  return out;
}

Routed routed_by_definition(const RoutingRule& rule, const std::vector<double>& logits, const std::vector<double>& bias) {
  Routed out{softmax_of(logits), {}, {}};
  const bool sigmoid = rule.score == RouterScore::sigmoid;
  for (size_t e = 0; sigmoid && e < logits.size(); ++e) out.scores[e] = 1.0 / (1.0 + std::exp(-logits[e]));
  std::vector<double> biased = out.scores;
  for (size_t e = 0; e < bias.size(); ++e) biased[e] += bias[e];
  out.experts = chosen_by(rule, biased);
  for (const int e : out.experts) out.weights.push_back((rule.softmax_after_topk ? logits : out.scores)[static_cast<size_t>(e)]);
  if (rule.softmax_after_topk) out.weights = softmax_of(out.weights);
  const double sum = rule.renormalize ? sum_of(out.weights) : 1.0;
  for (double& weight : out.weights) weight *= rule.scale / sum;
  return out;
}

RouteForward route(Backend& device, const Tensor& logits, int64_t sequences, const RoutingRule& rule, const Tensor& bias = {}) {
  const int64_t tokens = logits.dim(0), experts = logits.dim(1);
  const RouteForward out{.logits = logits,
                         .experts = empty(device, Dtype::i32, {tokens, rule.top_k}),
                         .weights = empty(device, logits.dtype(), {tokens, rule.top_k}),
                         .scores = empty(device, logits.dtype(), {tokens, experts}),
                         .counts = empty(device, Dtype::i32, {sequences, experts}),
                         .rule = rule,
                         .bias = bias};
  device.run(out);
  return out;
}

std::vector<double> row_of(const std::vector<double>& matrix, int64_t row, int64_t columns) {
  return {matrix.begin() + row * columns, matrix.begin() + (row + 1) * columns};
}

// Every third case has many equal logits.
RoutingRule drawn_rule(CaseDraw& draw, int64_t& experts) {
  const int64_t groups = draw.from<int64_t>({1, 1, 2, 4});
  experts = groups * (1 + draw.below(draw.one_in(3) ? 40 : 6));
  const int64_t kept = groups == 4 ? 2 : 1;
  const int64_t most = experts / groups * kept;
  RoutingRule rule{.top_k = draw.one_in(4) ? most : 1 + draw.below(most),
                   .score = draw.from({RouterScore::softmax, RouterScore::sigmoid}),
                   .softmax_after_topk = false,
                   .renormalize = draw.one_in(2),
                   .scale = draw.from({1.0, 2.5})};
  rule.softmax_after_topk = rule.score == RouterScore::softmax && draw.one_in(2);
  if (rule.top_k % kept == 0) rule.groups = groups, rule.groups_kept = kept;
  return rule;
}

class Router : public ContractCheck {};
INSTANTIATE_TEST_SUITE_P(, Router, ::testing::ValuesIn(all_backends()), backend_of);

class RouterReference : public BackendTest {};  // in fp64

TEST_F(RouterReference, ChoosesAndWeighsAsDefined) {
  for (uint32_t number = 0; number < 300; ++number) {
    CaseDraw draw(number);
    int64_t experts = 0;
    const RoutingRule rule = drawn_rule(draw, experts);
    const int64_t sequences = 1 + draw.below(3), tokens = sequences * (1 + draw.below(20));
    SCOPED_TRACE(
        text("case ", number, ": ", tokens, " tokens, ", experts, " experts, ", rule.top_k, " assignments, ", rule.groups, " groups"));
    std::vector<double> drawn = random_values(tokens * experts, 2 * number, 2.0), bias = random_values(experts, 2 * number + 1, 0.3);
    if (number % 3 == 0) {
      for (double& value : drawn) value = std::round(value);
    }
    if (draw.one_in(2)) std::fill(bias.begin(), bias.end(), 0.0);
    const RouteForward out = route(reference(), tensor_of(reference(), Dtype::f64, {tokens, experts}, drawn), sequences, rule,
                                   tensor_of(reference(), Dtype::f64, {experts}, bias));
    const std::vector<double> scores = values(out.scores), weights = values(out.weights), chosen = values(out.experts);
    std::vector<double> counts(static_cast<size_t>(sequences * experts));
    for (int64_t n = 0; n < tokens; ++n) {
      const Routed expected = routed_by_definition(rule, row_of(drawn, n, experts), bias);
      const std::vector<double> ids(expected.experts.begin(), expected.experts.end());
      ASSERT_EQ(row_of(chosen, n, rule.top_k), ids) << "token " << n;
      ASSERT_TRUE(close(row_of(scores, n, experts), expected.scores, 1e-13)) << "token " << n;
      ASSERT_TRUE(close(row_of(weights, n, rule.top_k), expected.weights, 1e-13)) << "token " << n;
      for (const int e : expected.experts) ++counts[static_cast<size_t>(n / (tokens / sequences) * experts + e)];
    }
    ASSERT_EQ(values(out.counts), counts);
  }
}

TEST_P(Router, GivesEqualLogitsToTheLowestExperts) {
  for (const RoutingRule& rule :
       {softmax_rule(3, false, true), softmax_rule(3, true, false), sigmoid_rule(3, true), sigmoid_rule(4, true, 4, 2)}) {
    const RouteForward out = route(device(), tensor_of(device(), Dtype::f32, {2, 8}, std::vector<double>(16, 0.7)), 1, rule);
    for (int64_t i = 0; i < 2 * rule.top_k; ++i)
      EXPECT_EQ(values(out.experts)[static_cast<size_t>(i)], static_cast<double>(i % rule.top_k));
    for (const double weight : values(out.weights)) EXPECT_NEAR(weight, 1.5 / static_cast<double>(rule.top_k), 1e-6);
  }
}

TEST_P(Router, TakesTurnsWhereItIsForced) {
  const RouteForward out = route(device(), random_tensor(device(), Dtype::f32, {5, 5}, 1), 1, forced(softmax_rule(2, false, false)));
  EXPECT_EQ(values(out.experts), (std::vector<double>{0, 1, 2, 3, 0, 4, 1, 2, 3, 4}));
  EXPECT_EQ(values(out.counts), (std::vector<double>{2, 2, 2, 2, 2}));
  const std::vector<double> scores = values(out.scores), weights = values(out.weights);
  EXPECT_NEAR(weights[5], 1.5 * scores[14], 1e-7) << "the score of expert 4 of token 2";
}

TEST_P(Router, ChoosesValidExpertsOfNanAndSaysSoInTheWeights) {
  for (const RoutingRule& rule : {softmax_rule(3, false, false), softmax_rule(3, true, true), sigmoid_rule(3, false),
                                  sigmoid_rule(4, true, 4, 2), softmax_rule(8, true, false)}) {
    for (const std::vector<size_t>& bad : {std::vector<size_t>{8}, {15}, {8, 9, 10, 11, 12, 13, 14, 15}, {9, 12, 14}}) {
      std::vector<double> logits = random_values(24, 5);
      for (const size_t i : bad) logits[i] = std::nan("");
      const RouteForward out = route(device(), tensor_of(device(), Dtype::f32, {3, 8}, logits), 1, rule);
      const std::vector<double> chosen = values(out.experts), weights = values(out.weights);
      const int64_t k = rule.top_k;
      for (int64_t i = 0; i < 3 * k; ++i) {
        const auto at = static_cast<size_t>(i);
        EXPECT_TRUE(chosen[at] >= 0 && chosen[at] < 8) << chosen[at];
        if (i % k > 0) {
          EXPECT_GT(chosen[at], chosen[at - 1]);
        }
        EXPECT_EQ(std::isnan(weights[at]), i / k == 1) << i;
      }
      if (rule.score == RouterScore::softmax || bad.size() != 1 || rule.groups > 1) continue;
      for (int64_t i = k; i < 2 * k; ++i) EXPECT_NE(chosen[static_cast<size_t>(i)], static_cast<double>(bad[0] - 8)) << "others are better";
    }
  }
}

TEST_P(Router, LetsTheBiasChooseOnly) {
  const Tensor logits = tensor_of(device(), Dtype::f32, {1, 3}, {2.0, 1.0, 0.0}),
               bias = tensor_of(device(), Dtype::f32, {3}, {0.0, 0.0, 9.0});
  const RouteForward out = route(device(), logits, 1, sigmoid_rule(2, false), bias);
  EXPECT_EQ(values(out.experts), (std::vector<double>{0, 2}));
  EXPECT_NEAR(values(out.weights)[1], 0.75, 1e-6);
}

// Padding goes nowhere, and the other tokens go where they would without it.
TEST_P(Router, HasNoExpertForPadding) {
  for (const auto& [name, s] : route_shapes()) {
    if (!s.padded || s.rule.forced) continue;
    const std::vector<double> logits = router_logits(s, 7);
    const RouteForward out = route(device(), tensor_of(device(), Dtype::f32, {s.tokens(), s.experts}, logits), s.sequences, s.rule);
    const std::vector<double> chosen = values(out.experts), weights = values(out.weights), scores = values(out.scores);
    std::vector<double> counts(static_cast<size_t>(s.sequences * s.experts));
    for (int64_t n = 0; n < s.tokens(); ++n) {
      const std::vector<double> row = row_of(logits, n, s.experts);
      const bool padding = std::isinf(row[0]);
      std::vector<double> own_experts(static_cast<size_t>(s.rule.top_k), -1.0), own_weights(own_experts.size()), own_scores(row.size());
      if (!padding) {
        const RouteForward alone = route(device(), tensor_of(device(), Dtype::f32, {1, s.experts}, row), 1, s.rule);
        own_experts = values(alone.experts), own_weights = values(alone.weights), own_scores = values(alone.scores);
        for (const double e : own_experts) counts[static_cast<size_t>(n / s.length * s.experts + static_cast<int64_t>(e))] += 1.0;
      }
      EXPECT_EQ(row_of(chosen, n, s.rule.top_k), own_experts) << name << ' ' << n;
      EXPECT_EQ(row_of(weights, n, s.rule.top_k), own_weights) << name << ' ' << n;
      EXPECT_EQ(row_of(scores, n, s.experts), own_scores) << name << ' ' << n;
    }
    EXPECT_EQ(values(out.counts), counts) << name;
  }
}

// A single -Inf is a logit like any other, and so are all but one.
TEST_P(Router, TakesATokenWithOneFiniteLogitForNoPadding) {
  const double none = -std::numeric_limits<double>::infinity();
  const RouteForward out =
      route(device(), tensor_of(device(), Dtype::f32, {2, 3}, {none, 1.0, 2.0, none, none, 0.5}), 1, softmax_rule(1, false, false));
  EXPECT_EQ(values(out.experts), (std::vector<double>{2, 2}));
  EXPECT_EQ(values(out.counts), (std::vector<double>{0, 0, 2}));
  EXPECT_EQ(values(out.weights)[1], 1.5);
}

// The three losses by their formulas, expert by expert, over the tokens that are no padding; sequences of padding alone have none.
std::vector<double> losses_by_definition(const RouteForward& k) {
  const int64_t tokens = k.logits.dim(0), experts = k.logits.dim(1), sequences = k.counts.dim(0), length = tokens / sequences;
  const std::vector<double> logits = values(k.logits), scores = values(k.scores), counts = values(k.counts);
  const auto counted = [&](int64_t first, int64_t last) {
    double out = 0.0;
    for (int64_t n = first; n < last; ++n) out += std::isinf(logits[static_cast<size_t>(n * experts)]) ? 0.0 : 1.0;
    return out;
  };
  const auto probability = [&](int64_t n, int64_t e) {
    const std::vector<double> row = row_of(scores, n, experts);
    return counted(n, n + 1) == 0.0 ? 0.0 : row[static_cast<size_t>(e)] / (k.rule.score == RouterScore::sigmoid ? sum_of(row) : 1.0);
  };
  const auto balance = [&](int64_t first, int64_t last) {  // covers some sequences
    double sum = 0.0;
    for (int64_t e = 0; e < experts; ++e) {
      double chosen = 0.0, probabilities = 0.0;
      for (int64_t s = first; s < last; ++s) chosen += counts[static_cast<size_t>(s * experts + e)];
      for (int64_t n = first * length; n < last * length; ++n) probabilities += probability(n, e);
      sum += chosen * probabilities;
    }
    const double t = counted(first * length, last * length);
    return t == 0.0 ? 0.0 : static_cast<double>(experts) / (static_cast<double>(k.rule.top_k) * t * t) * sum;
  };
  std::vector<double> out{balance(0, sequences), 0.0, 0.0};
  double with_tokens = 0.0;
  for (int64_t s = 0; s < sequences; ++s) with_tokens += counted(s * length, (s + 1) * length) > 0.0 ? 1.0 : 0.0;
  for (int64_t s = 0; s < sequences && with_tokens > 0.0; ++s) out[1] += balance(s, s + 1) / with_tokens;
  for (int64_t n = 0; n < tokens; ++n) {
    if (counted(n, n + 1) == 0.0) continue;
    double sum = 0.0;
    for (const double logit : row_of(logits, n, experts)) sum += std::exp(logit);
    out[2] += std::log(sum) * std::log(sum) / counted(0, tokens);
  }
  return out;
}

std::vector<double> losses_of(Backend& device, const RouteForward& k) {
  const Tensor out = empty(device, Dtype::f64, {3});
  device.run(RouterLosses{.logits = k.logits, .scores = k.scores, .counts = k.counts, .out = out, .rule = k.rule});
  return values(out);
}

TEST_F(RouterReference, GivesTheLossesAsDefined) {
  for (const auto& [name, shape] : route_shapes()) {
    const Tensor logits = tensor_of(reference(), Dtype::f64, {shape.tokens(), shape.experts}, router_logits(shape, 3, 1.0));
    const RouteForward k = route(reference(), logits, shape.sequences, shape.rule);
    EXPECT_TRUE(close(losses_of(reference(), k), losses_by_definition(k), 1e-12)) << name;
  }
}

TEST_P(Router, LosesNothingWithoutTokens) {
  const RouteForward none = route(device(), empty(device(), Dtype::f32, {0, 4}), 2, softmax_rule(2, false, false));
  EXPECT_EQ(losses_of(device(), none), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(values(none.counts), std::vector<double>(8));
}

TEST_F(RouterReference, LosesLeastWhenAllExpertsHaveTheirShare) {
  const RouteForward k = route(reference(), zeros(reference(), Dtype::f64, {8, 4}), 2, forced(softmax_rule(2, false, false)));
  EXPECT_TRUE(close(losses_of(reference(), k), {1.0, 1.0, std::log(4.0) * std::log(4.0)}, 1e-14));
}

struct Coefficients {
  double weights, balance, sequence_balance, z;
};

RouteBackward backward_of(const RouteForward& k, const Tensor& dweights, const Coefficients& c) {
  const RouteBackward out{.logits = k.logits,
                          .scores = k.scores,
                          .experts = k.experts,
                          .counts = k.counts,
                          .dweights = dweights,
                          .dlogits = empty_like(k.logits),
                          .rule = k.rule,
                          .balance = c.balance,
                          .sequence_balance = c.sequence_balance,
                          .z = c.z};
  k.logits.device().run(out);
  return out;
}

// The function that RouteBackward is the gradient of, with the counts of `at`, which has its assignments, too.
double objective(const RouteForward& at, const RouteForward& k, const std::vector<double>& dweights, const Coefficients& c) {
  EXPECT_EQ(values(k.experts), values(at.experts)) << "the logits lie too close together";
  RouteForward counted = k;
  counted.counts = at.counts;
  const std::vector<double> losses = losses_by_definition(counted), weights = values(k.weights);
  const double weighted = std::inner_product(weights.begin(), weights.end(), dweights.begin(), 0.0);
  return c.weights * weighted + c.balance * losses[0] + c.sequence_balance * losses[1] + c.z * losses[2];
}

TEST_F(RouterReference, HasTheGradientsOfWeightsAndLosses) {
  constexpr double kStep = 1e-5;
  for (const auto& [name, s] : route_shapes()) {
    if (s.tokens() > 50) continue;
    const std::vector<double> drawn = router_logits(s, 11), dweights = random_values(s.tokens() * s.rule.top_k, 12);
    const auto routed_at = [&](const std::vector<double>& logits) {
      return route(reference(), tensor_of(reference(), Dtype::f64, {s.tokens(), s.experts}, logits), s.sequences, s.rule);
    };
    const RouteForward at = routed_at(drawn);
    for (const Coefficients& c : {Coefficients{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}, {1, 0.3, 0.2, 0.1}}) {
      const Tensor d = tensor_of(reference(), Dtype::f64, {s.tokens(), s.rule.top_k}, dweights);
      if (c.weights == 0) reference().run(Fill{.out = d, .value = 0.0});
      std::vector<double> expected;
      for (size_t i = 0; i < drawn.size(); i += 1 + drawn.size() / 60) {
        std::vector<double> up = drawn, down = drawn;
        up[i] += kStep, down[i] -= kStep;
        const double change = objective(at, routed_at(up), dweights, c) - objective(at, routed_at(down), dweights, c);
        expected.push_back(change / (2 * kStep));
      }
      const std::vector<double> all = values(backward_of(at, d, c).dlogits);
      std::vector<double> actual;
      for (size_t i = 0; i < all.size(); i += 1 + all.size() / 60) actual.push_back(all[i]);
      const double largest = std::abs(*std::ranges::max_element(expected, {}, [](double x) { return std::abs(x); }));
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_NEAR(actual[i], expected[i], 1e-7 * largest + 1e-9) << name << ", " << c.weights << c.balance << c.sequence_balance << c.z;
      }
    }
  }
}

TEST_P(Router, HasNoGradientThroughTheOneRenormalizedWeightButThatOfTheLosses) {
  for (const RoutingRule& rule : {softmax_rule(1, false, true), softmax_rule(1, true, false), sigmoid_rule(1, true)}) {
    const RouteForward k = route(device(), random_tensor(device(), Dtype::f32, {6, 5}, 21), 2, rule);
    const Tensor dweights = random_tensor(device(), Dtype::f32, {6, 1}, 22);
    EXPECT_EQ(values(backward_of(k, dweights, {1, 0, 0, 0}).dlogits), std::vector<double>(30));
    for (const Coefficients& c : {Coefficients{0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}}) {
      for (const double d : values(backward_of(k, dweights, c).dlogits)) EXPECT_NE(d, 0.0);
    }
  }
}

TEST_P(Router, RefusesRulesThatCannotBe) {
  const RouteForward good = route(device(), f32({4, 6}), 2, sigmoid_rule(2, false, 3, 1));
  const auto refuses_rule = [&](const RoutingRule& rule, const std::vector<std::string>& words) {
    RouteForward bad = good;
    bad.rule = rule;
    refuses(bad, "route", words);
  };
  refuses_rule(sigmoid_rule(7, false), {"top_k is 7 of 6 experts"});
  refuses_rule(sigmoid_rule(0, false), {"top_k is 0"});
  refuses_rule(sigmoid_rule(2, false, 4, 1), {"groups is 4"});
  refuses_rule(sigmoid_rule(2, false, 3, 4), {"groups_kept 4"});
  refuses_rule(sigmoid_rule(3, false, 3, 1), {"top_k 3"});
  RoutingRule rule = sigmoid_rule(2, false);
  rule.softmax_after_topk = true;
  refuses_rule(rule, {"softmax_after_topk needs score softmax"});
  RouteForward bad = good;
  bad.counts = i32({3, 6});
  refuses(bad, "route", {"counts has 3 sequences, which do not divide 4 tokens"});
  bad.counts = i32({0, 6});
  refuses(bad, "route", {"counts has 0 sequences"});
  RouteBackward wrong = backward_of(good, f32({4, 2}), {1, 0, 0, 0});
  wrong.experts = tensor_of(device(), Dtype::i32, {4, 2}, {0, 1, 0, 1, 2, 6, 0, 1});
  refuses(wrong, "route backward", {"experts[5] is 6, not in [0, 6)"});
  wrong.experts = tensor_of(device(), Dtype::i32, {4, 2}, {0, 1, 0, 1, 2, -1, 0, 1});
  refuses(wrong, "route backward", {"experts[5] is -1, not in [0, 6)"});
}

}  // namespace mantissa::test::moe_route_test
