// The result of `mantissa compare`, made from the folders of its runs: what each recipe costs against the first one.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/json/json.h"
#include "mantissa/precision/plan.h"
#include "metrics/run_metrics.h"

namespace mantissa::tools {

// Statistics of paired runs: a recipe and the baseline train from the same seeds, so what a seed does to both cancels in their difference.
//
// With differences d_1 .. d_n, their mean m and s^2 = sum (d_i - m)^2 / (n - 1), the interval is m +- t s / sqrt(n), where t is the
// quantile of Student's distribution with n - 1 degrees of freedom (Student 1908, "The probable error of a mean"). It covers the mean of
// all seeds with the stated probability if differences are normally distributed.

constexpr double kConfidence = 0.95;

// Returns P(|T| <= t), t >= 0, of Student's distribution with so many degrees of freedom, at least 1. Source: the finite sums of Abramowitz
// and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
double student_probability(double t, int64_t degrees);

// Returns the t >= 0 of which P(|T| <= t) is `probability`, in [0, 1).
double student_quantile(double probability, int64_t degrees);

struct PairedDifference {
  int64_t pairs = 0;
  double mean = 0.0;
  std::optional<double> half_width = {};  // half of the interval around the mean; none: a single pair tells nothing about other seeds
};

// Takes as many values as the baseline has, at least one, in the order of the same seeds.
PairedDifference paired_difference(const std::vector<double>& values, const std::vector<double>& baseline, double confidence = kConfidence);

struct RecipeCost {
  std::string recipe;
  std::vector<double> losses = {};             // validation losses of the last step, by seed
  PairedDifference difference = {};            // against the baseline, in nats. Unset for the baseline itself
  PairedDifference change = {};                // its share of the loss of the baseline, mean over seeds
  std::map<std::string, double> cosines = {};  // cosines of gradients of the first step, by weight. Empty for the baseline
  double milliseconds = 0.0;                   // median step of the median run
  double bytes_per_weight = 0.0;               // resident, of all linears, without masters, gradients and moments
  std::optional<double> load = {};             // largest over mean load of an expert, in the worst layer and seed; none: no experts
  double loss() const;                         // mean over seeds
};

struct Comparison {
  std::string name;  // that of the configuration
  int64_t steps = 0;
  int at_a_time = 1, threads = 1;
  std::vector<RecipeCost> recipes = {};  // the first is the baseline
};

// Returns losses, time and load of a recipe from its runs, by seed. Throws Error(data) for a run without a validation loss.
RecipeCost recipe_cost(const std::string& recipe, const PrecisionPlan& plan, const std::vector<RunMetrics>& runs);

// Fills in the differences to the first recipe.
void compare_with_first(std::vector<RecipeCost>& recipes);

Json comparison_json(const Comparison& comparison);
std::string comparison_table(const Comparison& comparison);  // lines for people

}  // namespace mantissa::tools
