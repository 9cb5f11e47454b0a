#include "tools/compare/comparison.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <numbers>
#include <numeric>

#include "mantissa/base/error.h"
#include "mantissa/base/text.h"
#include "plan/plan_table.h"

namespace mantissa::tools {
namespace {

// P(|T| <= t) by the angle whose tangent is t / sqrt(degrees).
double probability_of(double angle, int64_t degrees) {
  const double cosine = std::cos(angle), sine = std::sin(angle);
  const bool odd = degrees % 2 == 1;
  double sum = 0.0, term = odd ? cosine : 1.0;
  for (int64_t power = odd ? 1 : 0; power <= degrees - 2; power += 2) {
    sum += term;
    term *= cosine * cosine * static_cast<double>(power + 1) / static_cast<double>(power + 2);
  }
  return odd ? (angle + sine * sum) * 2 * std::numbers::inv_pi : sine * sum;
}

}  // namespace

double student_probability(double t, int64_t degrees) {
  require(t >= 0.0 && degrees >= 1, "student_probability: t is ", t, " with ", degrees, " degrees of freedom");
  return probability_of(std::atan(t / std::sqrt(static_cast<double>(degrees))), degrees);
}

double student_quantile(double probability, int64_t degrees) {
  require(probability >= 0.0 && probability < 1.0 && degrees >= 1, "student_quantile: a probability of ", probability, " with ", degrees,
          " degrees of freedom");
  double low = 0.0, high = std::numbers::pi / 2;  // angles, of which the probability is a growing function
  for (int halving = 0; halving < 64; ++halving) {
    const double middle = low + (high - low) / 2;
    (probability_of(middle, degrees) < probability ? low : high) = middle;
  }
  return std::tan(low) * std::sqrt(static_cast<double>(degrees));
}

PairedDifference paired_difference(const std::vector<double>& values, const std::vector<double>& baseline, double confidence) {
  require(!values.empty() && values.size() == baseline.size(), "paired_difference: ", values.size(), " values and ", baseline.size());
  const auto count = static_cast<double>(values.size());
  std::vector<double> differences;
  for (size_t i = 0; i < values.size(); ++i) differences.push_back(values[i] - baseline[i]);
  PairedDifference out{.pairs = std::ssize(values), .mean = std::accumulate(differences.begin(), differences.end(), 0.0) / count};
  if (out.pairs == 1) return out;
  double squares = 0.0;
  for (const double difference : differences) squares += (difference - out.mean) * (difference - out.mean);
  out.half_width = student_quantile(confidence, out.pairs - 1) * std::sqrt(squares / (count - 1) / count);
  return out;
}

namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// The first step of a start also pays for memory and generated kernels.
double median_milliseconds(const RunMetrics& run) {
  std::vector<double> steps;
  for (const MetricPoint& point : run.milliseconds) {
    if (std::ranges::none_of(run.starts, [&](int64_t start) { return point.step == start + 1; })) steps.push_back(point.value);
  }
  return median(std::move(steps));
}

// Largest over mean load of an expert, over all assignments of the newest reports, in the worst layer.
std::optional<double> largest_load(const RunMetrics& run) {
  std::map<int64_t, std::vector<int64_t>> loads;  // by layer
  for (const RoutingPoint& point : run.routing) {
    for (const LayerRouting& layer : point.layers) {
      std::vector<int64_t>& load = loads[layer.layer];
      load.resize(std::max(load.size(), layer.load.size()));
      for (size_t e = 0; e < layer.load.size(); ++e) load[e] += layer.load[e];
    }
  }
  std::optional<double> worst;
  for (const auto& [layer, load] : loads) {
    const auto all = static_cast<double>(std::accumulate(load.begin(), load.end(), int64_t{0}));
    if (all > 0.0) worst = std::max(worst.value_or(0.0), static_cast<double>(std::ranges::max(load) * std::ssize(load)) / all);
  }
  return worst;
}

std::string with_interval(const PairedDifference& difference, double factor, int digits) {
  const std::string mean = text(std::showpos, std::fixed, std::setprecision(digits), factor * difference.mean);
  return difference.half_width ? mean + " +- " + rounded(factor * *difference.half_width, digits) : mean;
}

Json json_of(const PairedDifference& difference) {
  return {{"mean", difference.mean}, {"half_width", difference.half_width}, {"pairs", difference.pairs}};
}

// The weight whose gradient agrees least, and the one that agrees most.
struct CosineRange {
  std::pair<std::string, double> least, most;
};
std::optional<CosineRange> cosine_range(const std::map<std::string, double>& cosines) {
  if (cosines.empty()) return {};
  const auto [least, most] = std::ranges::minmax_element(cosines, {}, [](const auto& cosine) { return cosine.second; });
  return CosineRange{*least, *most};
}

using Rows = std::vector<std::vector<std::string>>;

std::vector<std::string> row_of(const RecipeCost& cost, const RecipeCost& first) {
  const bool baseline = &cost == &first;
  const std::optional<CosineRange> range = cosine_range(cost.cosines);
  const std::string cosine = baseline ? "1" : range ? rounded(range->least.second, 4) + " to " + rounded(range->most.second, 4) : "none";
  std::vector<std::string> row = {cost.recipe,
                                  rounded(cost.loss(), 4),
                                  baseline ? "" : with_interval(cost.difference, 1, 4),
                                  baseline ? "" : with_interval(cost.change, 100, 2) + " %",
                                  cosine,
                                  rounded(cost.milliseconds, 1),
                                  first.milliseconds > 0 ? rounded(cost.milliseconds / first.milliseconds, 2) : "",
                                  text(std::setprecision(4), cost.bytes_per_weight)};
  if (first.load) row.push_back(cost.load ? rounded(*cost.load, 2) : "");
  return row;
}

}  // namespace

double RecipeCost::loss() const { return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size()); }

RecipeCost recipe_cost(const std::string& recipe, const PrecisionPlan& plan, const std::vector<RunMetrics>& runs) {
  RecipeCost out{.recipe = recipe};
  std::vector<double> milliseconds;
  for (const RunMetrics& run : runs) {
    require(!run.valid_loss.empty(), ExitCode::data, run.name, ": its metrics have no validation loss");
    out.losses.push_back(run.valid_loss.back().value);
    milliseconds.push_back(median_milliseconds(run));
    if (const std::optional<double> load = largest_load(run)) out.load = std::max(out.load.value_or(0.0), *load);
  }
  out.milliseconds = median(std::move(milliseconds));
  int64_t bytes = 0, weights = 0;
  for (const ModulePrecision& module : plan.modules()) {
    if (module.module.kind != ModuleKind::linear) continue;
    bytes += module.bytes;
    weights += module.module.parameters();
  }
  out.bytes_per_weight = static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, weights));
  return out;
}

void compare_with_first(std::vector<RecipeCost>& recipes) {
  const std::vector<double>& baseline = recipes.front().losses;
  for (size_t r = 1; r < recipes.size(); ++r) {
    std::vector<double> ratios;
    for (size_t i = 0; i < baseline.size(); ++i) ratios.push_back(recipes[r].losses.at(i) / baseline[i]);
    recipes[r].difference = paired_difference(recipes[r].losses, baseline);
    recipes[r].change = paired_difference(ratios, std::vector<double>(baseline.size(), 1.0));
  }
}

Json comparison_json(const Comparison& comparison) {
  const RecipeCost& first = comparison.recipes.front();
  Json::Entries recipes;
  for (const RecipeCost& cost : comparison.recipes) {
    const bool baseline = &cost == &first;
    Json cosines = Json::Members();
    for (const auto& [weight, cosine] : cost.cosines) cosines.add(weight, cosine);
    recipes.push_back(Json{{"recipe", cost.recipe},
                           {"loss", cost.loss()},
                           {"losses", cost.losses},
                           {"difference", baseline ? Json() : json_of(cost.difference)},
                           {"change", baseline ? Json() : json_of(cost.change)},
                           {"cosines", cosines},
                           {"ms_per_step", cost.milliseconds},
                           {"bytes_per_weight", cost.bytes_per_weight},
                           {"load", cost.load}});
  }
  return {{"name", comparison.name},   {"steps", comparison.steps},         {"seeds", first.losses.size()},
          {"confidence", kConfidence}, {"at_a_time", comparison.at_a_time}, {"threads", comparison.threads},
          {"baseline", first.recipe},  {"recipes", std::move(recipes)}};
}

std::string comparison_table(const Comparison& comparison) {
  const std::vector<RecipeCost>& recipes = comparison.recipes;
  const size_t seeds = recipes.front().losses.size();
  Rows rows = {{"recipe", "loss", "difference", "change", "cosine of gradients", "ms a step", "time", "bytes per weight"}};
  if (recipes.front().load) rows.front().push_back("load");
  for (const RecipeCost& cost : recipes) rows.push_back(row_of(cost, recipes.front()));
  std::string out = text(comparison.name, " | ", count_text(comparison.steps, "step"), " | ", count_text(seeds, "seed"), " | ",
                         count_text(comparison.at_a_time, "run"), " at a time, ", count_text(comparison.threads, "thread"), " each\n\n",
                         aligned(rows, Columns::numbers), '\n');
  out += seeds > 1 ? text("difference and change: mean over ", seeds, " pairs of equal seeds, +- Student's t at ", 100 * kConfidence,
                          " %; an interval with 0 in it shows no difference\n")
                   : text("difference and change have no interval: one seed tells nothing about others\n");
  for (const RecipeCost& cost : recipes) {
    if (const auto range = cosine_range(cost.cosines)) out += text("least cosine of ", cost.recipe, ": ", range->least.first, '\n');
  }
  return out;
}

}  // namespace mantissa::tools
