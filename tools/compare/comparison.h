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

// How the times of steps were measured. Those of runs that were not measured alike have no ratio.
struct Measured {
  int at_a_time = 1;  // runs beside each other
  int threads = 1;    // threads of each run

  bool operator==(const Measured&) const = default;
  void fields(auto& v) {
    v("at_a_time", at_a_time);
    v("threads", threads);
  }
};

// A run of a recipe, with one of the seeds.
struct ComparedMetrics {
  RunMetrics metrics = {};
  std::optional<Measured> measured = {};  // none: in different ways, or nobody knows
  bool diverged = false;
};

// A teacher, by a hash of it, and the share of its divergence in the loss.
struct Learning {
  std::string teacher;
  double weight = 1.0;

  bool operator==(const Learning&) const = default;
};

struct RecipeCost {
  std::string recipe;
  std::optional<Learning> learning = {};  // none: without a teacher
  int64_t steps = 0, tokens_per_step = 0;
  std::vector<std::optional<double>> losses = {};   // validation losses of the last step, by seed; none: that run diverged
  std::optional<PairedDifference> difference = {};  // against the baseline, in nats, of pairs of which no run diverged; none: no such pair
  std::optional<PairedDifference> change = {};      // its share of the loss of the baseline, mean over these pairs
  std::vector<std::optional<double>> objectives = {};  // beside a teacher, like losses: what the best checkpoint is chosen by
  std::optional<PairedDifference> objective_difference = {};
  std::map<std::string, double> cosines = {};  // cosines of gradients of the first step, by weight. Empty for the baseline
  std::string no_cosines = {};                 // why there are none; "": there are, or this is the baseline
  std::optional<Measured> measured = {};       // none: its runs were measured in different ways
  std::optional<double> milliseconds = {};     // median step of the median run of those that did not diverge
  double bytes_per_weight = 0.0;               // resident, of all linears, without masters, gradients and moments
  std::optional<double> load = {};             // largest over mean load of an expert, in the worst layer and seed; none: no experts
  std::optional<double> loss() const;          // mean over the seeds that did not diverge
  std::optional<double> objective() const;
  std::vector<int64_t> diverged_seeds() const;
};

struct Comparison {
  std::string name;                      // that of the configuration
  std::vector<RecipeCost> recipes = {};  // the first is the baseline
};

// Returns losses, time and load of a recipe from its runs, by seed. A run whose last loss is not finite has diverged, too. Throws
// Error(data) for a run without a validation loss that did not.
RecipeCost recipe_cost(const std::string& recipe, const PrecisionPlan& plan, const std::vector<ComparedMetrics>& runs,
                       const std::optional<Learning>& learning = {});

// Names the first weight of a GEMM that one of two models lacks or has in another shape; "": there is none.
std::string tensor_difference(const PrecisionPlan& plan, const PrecisionPlan& baseline);

// Fills in the differences to the first recipe.
void compare_with_first(std::vector<RecipeCost>& recipes);

Json comparison_json(const Comparison& comparison);
std::string comparison_table(const Comparison& comparison);  // lines for people
Json comparison_page(const Comparison& comparison);          // title, head, rows and notes of this table, for report_page()

}  // namespace mantissa::tools
