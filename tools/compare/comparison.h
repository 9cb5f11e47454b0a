// The result of `mantissa compare`, made from the folders of its runs: what each recipe costs against the first one.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/json/json.h"
#include "mantissa/precision/plan.h"
#include "metrics/paired_difference.h"
#include "metrics/run_metrics.h"

namespace mantissa::tools {

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
