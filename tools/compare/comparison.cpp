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

std::optional<double> median(std::vector<double> values) {
  if (values.empty()) return {};
  std::ranges::sort(values);
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// The first step of a start also pays for memory and generated kernels.
std::optional<double> median_milliseconds(const RunMetrics& run) {
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

std::string with_interval(const std::optional<PairedDifference>& difference, double factor, int digits, const char* unit = "") {
  if (!difference) return "-";
  const std::string mean = text(std::showpos, std::fixed, std::setprecision(digits), factor * difference->mean);
  return (difference->half_width ? mean + " +- " + rounded(factor * *difference->half_width, digits) : mean) + unit;
}

std::string shown(const std::optional<double>& value, int digits) { return value ? rounded(*value, digits) : "-"; }

Json json_of(const std::optional<PairedDifference>& difference) {
  if (!difference) return {};
  return {{"mean", difference->mean}, {"half_width", difference->half_width}, {"pairs", difference->pairs}};
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

std::optional<double> time_ratio(const RecipeCost& cost, const RecipeCost& first) {
  const bool alike = cost.measured && cost.measured == first.measured;
  return alike && cost.milliseconds && first.milliseconds.value_or(0.0) > 0.0 ? std::optional(*cost.milliseconds / *first.milliseconds)
                                                                              : std::nullopt;
}

using Values = std::vector<std::optional<double>>;

// Returns the mean of those that are there.
std::optional<double> mean(const Values& values) {
  double sum = 0.0;
  int64_t count = 0;
  for (const std::optional<double>& value : values) {
    sum += value.value_or(0.0);
    count += value ? 1 : 0;
  }
  return count > 0 ? std::optional(sum / static_cast<double>(count)) : std::nullopt;
}

// Returns the difference over the pairs of which both are there.
std::optional<PairedDifference> difference_of(const Values& values, const Values& baseline) {
  std::vector<double> own, others;
  for (size_t i = 0; i < baseline.size(); ++i) {
    if (!values.at(i) || !baseline[i]) continue;
    own.push_back(*values[i]);
    others.push_back(*baseline[i]);
  }
  return own.empty() ? std::nullopt : std::optional(paired_difference(own, others));
}

// Returns the objective of the last evaluation beside a teacher; none: it is not finite.
std::optional<double> last_objective(const RunMetrics& run, double weight) {
  if (run.valid_kl.empty() || run.valid_kl.back().step != run.valid_loss.back().step) return {};
  const double reached = Evaluation{.loss = run.valid_loss.back().value, .divergence = run.valid_kl.back().value}.objective(weight);
  return std::isfinite(reached) ? std::optional(reached) : std::nullopt;
}

// Returns whether all recipes agree in what `of` takes from each.
template <class Of>
bool same(const std::vector<RecipeCost>& recipes, Of of) {
  return std::ranges::all_of(recipes, [&](const RecipeCost& cost) { return of(cost) == of(recipes.front()); });
}
bool any_diverged(const std::vector<RecipeCost>& recipes) {
  return std::ranges::any_of(recipes, [](const RecipeCost& cost) { return !cost.diverged_seeds().empty(); });
}
// Returns how all times were measured; none: not alike. Recipes of which every run diverged have no times.
std::optional<Measured> common_way(const std::vector<RecipeCost>& recipes) {
  std::vector<std::optional<Measured>> ways;
  for (const RecipeCost& cost : recipes)
    if (cost.loss()) ways.push_back(cost.measured);
  const bool alike = std::ranges::all_of(ways, [&](const std::optional<Measured>& way) { return way == ways.front(); });
  return alike && !ways.empty() ? ways.front() : std::nullopt;
}

// Returns whether all recipes learn alike from one teacher.
bool has_objective(const std::vector<RecipeCost>& recipes) {
  return recipes.front().learning && same(recipes, [](const RecipeCost& cost) { return cost.learning; });
}
std::string objective_of(const std::vector<RecipeCost>& recipes) {
  return has_objective(recipes) ? objective_name(recipes.front().learning->weight) : "";
}

int64_t tokens_of(const RecipeCost& cost) { return cost.steps * cost.tokens_per_step; }

std::string cosine_text(const RecipeCost& cost) {
  if (const auto range = cosine_range(cost.cosines)) return rounded(range->least.second, 4) + " to " + rounded(range->most.second, 4);
  return cost.no_cosines.empty() ? "1" : "none";
}

std::string difference_text(const std::optional<PairedDifference>& difference, int64_t seeds) {
  const bool all = !difference || difference->pairs == seeds;
  return with_interval(difference, 1, 4) + (all ? "" : text(" (", count_text(difference->pairs, "pair"), ")"));
}

// A column with a name that all recipes have, or that only some comparisons need.
struct TableColumn {
  std::string name;
  std::vector<std::string> cells = {};
};
std::vector<TableColumn> columns_of(const std::vector<RecipeCost>& recipes) {
  const RecipeCost& first = recipes.front();
  std::vector<TableColumn> columns;
  const auto add = [&](const std::string& name, const auto& cell) {
    TableColumn& column = columns.emplace_back(TableColumn{name});
    for (const RecipeCost& cost : recipes) column.cells.push_back(cell(cost));
  };
  const auto unless_first = [&](const RecipeCost& cost, const std::string& cell) { return &cost == &first ? "" : cell; };
  add("recipe", [](const RecipeCost& cost) { return cost.recipe; });
  if (!same(recipes, [](const RecipeCost& cost) { return cost.steps; }))
    add("steps", [](const RecipeCost& cost) { return text(cost.steps); });
  if (!same(recipes, [](const RecipeCost& cost) { return cost.tokens_per_step; }))
    add("tokens a step", [](const RecipeCost& cost) { return text(cost.tokens_per_step); });
  if (any_diverged(recipes))
    add("diverged", [](const RecipeCost& cost) { return text(cost.diverged_seeds().size(), " of ", cost.losses.size()); });
  const int64_t seeds = std::ssize(first.losses);
  if (const std::string objective = objective_of(recipes); !objective.empty()) {
    add(objective, [](const RecipeCost& cost) { return shown(cost.objective(), 4); });
    add("its difference", [&](const RecipeCost& cost) { return unless_first(cost, difference_text(cost.objective_difference, seeds)); });
  }
  add("loss", [](const RecipeCost& cost) { return shown(cost.loss(), 4); });
  add("difference", [&](const RecipeCost& cost) { return unless_first(cost, difference_text(cost.difference, seeds)); });
  add("change", [&](const RecipeCost& cost) { return unless_first(cost, with_interval(cost.change, 100, 2, " %")); });
  add("cosine of gradients", cosine_text);
  add("ms a step", [](const RecipeCost& cost) { return shown(cost.milliseconds, 1); });
  add("time", [&](const RecipeCost& cost) { return shown(time_ratio(cost, first), 2); });
  add("bytes per weight", [](const RecipeCost& cost) { return text(std::setprecision(4), cost.bytes_per_weight); });
  if (first.load) add("load", [](const RecipeCost& cost) { return cost.load ? rounded(*cost.load, 2) : ""; });
  return columns;
}

std::string measured_text(const std::optional<Measured>& measured) {
  return measured ? text(measured->at_a_time, " at a time with ", count_text(measured->threads, "thread")) : "in different ways";
}

std::vector<std::string> notes_of(const std::vector<RecipeCost>& recipes) {
  std::vector<std::string> notes;
  const size_t seeds = recipes.front().losses.size();
  const bool diverged = any_diverged(recipes);
  notes.push_back(seeds > 1 ? text("difference and change: mean over ", diverged ? "the" : text(seeds),
                                   " pairs of equal seeds, +- Student's t at ", 100 * kConfidence,
                                   " %; an interval with 0 in it shows no difference")
                            : "difference and change have no interval: one seed tells nothing about others");
  if (diverged) {
    std::vector<std::string> runs;
    for (const RecipeCost& cost : recipes)
      for (const int64_t seed : cost.diverged_seeds()) runs.push_back(text(cost.recipe, "-seed", seed));
    notes.push_back(text("diverged: ", joined(runs),
                         "; losses and times are of the other runs, differences of pairs without these, which "
                         "flatters whoever diverges"));
  }
  if (const std::string objective = objective_of(recipes); !objective.empty()) {
    notes.push_back(
        text(objective, ": validation of what the runs are trained for, at temperature 1; loss: the cross entropy of the targets"));
  } else if (std::ranges::any_of(recipes, [](const RecipeCost& cost) { return cost.learning.has_value(); })) {
    notes.emplace_back("recipes learn from different teachers, or with different teacher_weight: only the cross entropies are compared");
  }
  if (!same(recipes, tokens_of)) notes.emplace_back("recipes train on different numbers of tokens: losses differ by that, too");
  if (!same(recipes, [](const RecipeCost& cost) { return cost.tokens_per_step; }))
    notes.emplace_back("times are of steps with different numbers of tokens");
  const auto trained = [](const RecipeCost& cost) { return cost.loss().has_value(); };
  if (!common_way(recipes) && std::ranges::any_of(recipes, trained)) {
    const auto how = [](const RecipeCost& cost) { return cost.recipe + " " + measured_text(cost.measured); };
    notes.push_back(text("times were not measured alike (", joined(recipes, ", ", how),
                         "), so some have no ratio: for all, train all into another --output, with the same --jobs and threads"));
  }
  for (const RecipeCost& cost : recipes) {
    if (const auto range = cosine_range(cost.cosines)) notes.push_back(text("least cosine of ", cost.recipe, ": ", range->least.first));
    if (!cost.no_cosines.empty()) notes.push_back(text("cosine of ", cost.recipe, ": none, since ", cost.no_cosines));
  }
  return notes;
}

std::string title_of(const Comparison& comparison) {
  const std::vector<RecipeCost>& recipes = comparison.recipes;
  const auto [least, most] = std::ranges::minmax(recipes, {}, &RecipeCost::steps);
  const std::optional<Measured> measured = common_way(recipes);
  return text(comparison.name, " | ", least.steps < most.steps ? text(least.steps, " to ") : "", count_text(most.steps, "step"), " | ",
              count_text(recipes.front().losses.size(), "seed"),
              measured
                  ? text(" | ", count_text(measured->at_a_time, "run"), " at a time, ", count_text(measured->threads, "thread"), " each")
                  : "");
}

using Rows = std::vector<std::vector<std::string>>;

Rows rows_of(const std::vector<RecipeCost>& recipes) {
  Rows rows(1 + recipes.size());
  for (const TableColumn& column : columns_of(recipes)) {
    rows[0].emplace_back(column.name);
    for (size_t r = 0; r < recipes.size(); ++r) rows[1 + r].push_back(column.cells[r]);
  }
  return rows;
}

std::string shape_text(const ModuleShape& module) {
  return text("[", module.matrices > 1 ? text(module.matrices, ", ") : "", module.out, ", ", module.in, "]");
}

std::map<std::string, std::string> weight_shapes(const PrecisionPlan& plan) {
  std::map<std::string, std::string> shapes;
  for (const ModulePrecision& module : plan.modules())
    if (module.module.multiplies()) shapes[module.module.path] = shape_text(module.module);
  return shapes;
}

}  // namespace

std::optional<double> RecipeCost::loss() const { return mean(losses); }
std::optional<double> RecipeCost::objective() const { return mean(objectives); }

std::vector<int64_t> RecipeCost::diverged_seeds() const {
  std::vector<int64_t> seeds;
  for (size_t i = 0; i < losses.size(); ++i)
    if (!losses[i]) seeds.push_back(static_cast<int64_t>(i) + 1);
  return seeds;
}

RecipeCost recipe_cost(const std::string& recipe, const PrecisionPlan& plan, const std::vector<ComparedMetrics>& runs,
                       const std::optional<Learning>& learning) {
  RecipeCost out{.recipe = recipe, .learning = learning};
  std::vector<double> milliseconds;
  std::vector<std::optional<Measured>> measured;
  for (const auto& [run, way, diverged] : runs) {
    require(diverged || !run.valid_loss.empty(), ExitCode::data, run.name, ": its metrics have no validation loss");
    if (diverged || !std::isfinite(run.valid_loss.back().value)) {
      out.losses.emplace_back();
      out.objectives.emplace_back();
      continue;
    }
    out.objectives.push_back(learning ? last_objective(run, learning->weight) : std::nullopt);
    out.losses.emplace_back(run.valid_loss.back().value);
    measured.push_back(way);
    if (const std::optional<double> time = median_milliseconds(run)) milliseconds.push_back(*time);
    if (const std::optional<double> load = largest_load(run)) out.load = std::max(out.load.value_or(0.0), *load);
  }
  const bool alike = std::ranges::all_of(measured, [&](const auto& way) { return way == measured.front(); });
  if (alike && !measured.empty()) out.measured = measured.front();
  if (out.measured) out.milliseconds = median(std::move(milliseconds));
  int64_t bytes = 0, weights = 0;
  for (const ModulePrecision& module : plan.modules()) {
    if (module.module.kind != ModuleKind::linear) continue;
    bytes += module.bytes;
    weights += module.module.parameters();
  }
  out.bytes_per_weight = static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, weights));
  return out;
}

std::string tensor_difference(const PrecisionPlan& plan, const PrecisionPlan& baseline) {
  const std::map<std::string, std::string> own = weight_shapes(plan), others = weight_shapes(baseline);
  for (const auto& [path, shape] : own) {
    const auto found = others.find(path);
    if (found == others.end()) return text("the baseline has no ", path);
    if (found->second != shape) return text(path, " is ", shape, ", and ", found->second, " in the baseline");
  }
  for (const auto& [path, shape] : others)
    if (!own.contains(path)) return text("it has no ", path);
  return "";
}

void compare_with_first(std::vector<RecipeCost>& recipes) {
  const Values& baseline = recipes.front().losses;
  for (size_t r = 1; r < recipes.size(); ++r) {
    Values ratios = recipes[r].losses;
    for (size_t i = 0; i < baseline.size(); ++i)
      if (ratios.at(i) && baseline[i]) *ratios[i] /= *baseline[i];
    Values ones = baseline;
    for (std::optional<double>& one : ones)
      if (one) one = 1.0;
    recipes[r].difference = difference_of(recipes[r].losses, baseline);
    recipes[r].change = difference_of(ratios, ones);
    if (has_objective(recipes)) recipes[r].objective_difference = difference_of(recipes[r].objectives, recipes.front().objectives);
  }
}

Json comparison_json(const Comparison& comparison) {
  const RecipeCost& first = comparison.recipes.front();
  const auto measured_json = [](const std::optional<Measured>& way, int Measured::*member) { return way ? Json((*way).*member) : Json(); };
  const std::optional<Measured> all = common_way(comparison.recipes);
  const std::string objective = objective_of(comparison.recipes);
  const bool one_length = same(comparison.recipes, [](const RecipeCost& cost) { return cost.steps; });
  Json::Entries recipes;
  for (const RecipeCost& cost : comparison.recipes) {
    Json cosines = Json::Members();
    for (const auto& [weight, cosine] : cost.cosines) cosines.add(weight, cosine);
    recipes.push_back(Json{{"recipe", cost.recipe},
                           {"steps", cost.steps},
                           {"tokens_per_step", cost.tokens_per_step},
                           {"loss", cost.loss()},
                           {"losses", cost.losses},
                           {"diverged_seeds", cost.diverged_seeds()},
                           {"objective", objective.empty() ? Json() : Json(cost.objective())},
                           {"objectives", objective.empty() ? Json() : Json(cost.objectives)},
                           {"objective_difference", json_of(cost.objective_difference)},
                           {"difference", json_of(cost.difference)},
                           {"change", json_of(cost.change)},
                           {"cosines", cosines},
                           {"no_cosines", cost.no_cosines.empty() ? Json() : Json(cost.no_cosines)},
                           {"at_a_time", measured_json(cost.measured, &Measured::at_a_time)},
                           {"threads", measured_json(cost.measured, &Measured::threads)},
                           {"ms_per_step", cost.milliseconds},
                           {"time", time_ratio(cost, first)},
                           {"bytes_per_weight", cost.bytes_per_weight},
                           {"load", cost.load}});
  }
  return {{"name", comparison.name},
          {"steps", one_length ? Json(first.steps) : Json()},
          {"seeds", first.losses.size()},
          {"confidence", kConfidence},
          {"at_a_time", measured_json(all, &Measured::at_a_time)},
          {"threads", measured_json(all, &Measured::threads)},
          {"baseline", first.recipe},
          {"objective", objective.empty() ? "loss" : objective},
          {"recipes", std::move(recipes)}};
}

std::string comparison_table(const Comparison& comparison) {
  std::string out = text(title_of(comparison), "\n\n", aligned(rows_of(comparison.recipes), Columns::numbers), '\n');
  for (const std::string& note : notes_of(comparison.recipes)) out += note + '\n';
  return out;
}

Json comparison_page(const Comparison& comparison) {
  const Rows rows = rows_of(comparison.recipes);
  Json::Entries cells(rows.begin() + 1, rows.end());
  return {{"title", title_of(comparison)}, {"head", rows.front()}, {"rows", std::move(cells)}, {"notes", notes_of(comparison.recipes)}};
}

}  // namespace mantissa::tools
