// The table and the JSON of `mantissa compare`, from metrics of runs that are made up.
#include "tools/compare/comparison.h"

#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "mantissa/train/load_config.h"
#include "testing.h"
#include "tools/compare/run_folders.h"

namespace mantissa::comparison_test {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using tools::ComparedMetrics;
using tools::Comparison;
using tools::Measured;
using tools::RecipeCost;

PrecisionPlan plan_with(const std::string& recipe, const json& changes = json::object()) {
  json model = {{"vocab_size", 64}, {"hidden_size", 64}, {"num_layers", 1}, {"num_attention_heads", 2}, {"intermediate_size", 64}};
  model.update(changes);
  const json all = {{"model", model}, {"precision", {{"dtype", "bf16"}, {"recipe", recipe}}}, {"data", {{"path", "none"}}}};
  return resolve_plan(load_run_config({.file = "c.json", .text = all.dump(), .set_files = {}, .sets = {}}, Inputs::unchecked, 1).config);
}

ComparedMetrics run_with(double loss, const std::vector<double>& milliseconds, std::optional<Measured> measured = Measured()) {
  ComparedMetrics out{.metrics = {}, .measured = measured};
  RunMetrics& run = out.metrics;
  run.name = "run";
  run.starts = {0};
  run.valid_loss = {{1, 9.0}, {4, loss}};
  for (size_t i = 0; i < milliseconds.size(); ++i) run.milliseconds.push_back({static_cast<int64_t>(i) + 1, milliseconds[i]});
  return out;
}

ComparedMetrics diverged_run() {
  ComparedMetrics run = run_with(9.0, {1, 1});
  run.metrics.valid_loss.pop_back();
  run.diverged = true;
  return run;
}

Comparison comparison_of(const std::vector<ComparedMetrics>& high, const std::vector<ComparedMetrics>& mxfp8) {
  Comparison out{.name = "c.json", .recipes = {}};
  out.recipes.push_back(tools::recipe_cost("high", plan_with("high"), high));
  out.recipes.push_back(tools::recipe_cost("mxfp8", plan_with("mxfp8"), mxfp8));
  for (RecipeCost& cost : out.recipes) cost.steps = 4;
  out.recipes.back().cosines = {{"a.weight", 0.99}, {"b.weight", 0.9512}};
  compare_with_first(out.recipes);
  return out;
}

TEST(Comparison, HasTheFiguresOfTheRuns) {
  const Comparison found = comparison_of({run_with(2.0, {50, 10, 11, 30}), run_with(4.0, {9, 13, 12, 90})},
                                         {run_with(2.2, {50, 20, 22, 60}), run_with(4.2, {9, 26, 24, 90})});
  const auto& [high, mxfp8] = std::tie(found.recipes[0], found.recipes[1]);
  EXPECT_DOUBLE_EQ(high.loss().value(), 3.0);
  EXPECT_DOUBLE_EQ(high.milliseconds.value(), 12.0) << "medians without the first step: 11 and 13";
  EXPECT_DOUBLE_EQ(high.bytes_per_weight, 2.0);
  EXPECT_NEAR(mxfp8.bytes_per_weight, 3.001, 1e-3);
  EXPECT_NEAR(mxfp8.difference->mean, 0.2, 1e-12);
  EXPECT_NEAR(mxfp8.difference->half_width.value(), 0.0, 1e-9) << "both seeds differ by as much";
  EXPECT_NEAR(mxfp8.change->mean, (0.1 + 0.05) / 2, 1e-12);
  EXPECT_NEAR(mxfp8.change->half_width.value(), 12.7062 * 0.05 / 2, 1e-4);
}

TEST(Comparison, IsATableForPeople) {
  const std::string table = comparison_table(comparison_of({run_with(2.0, {50, 10, 11, 30}), run_with(4.0, {9, 13, 12, 90})},
                                                           {run_with(2.2, {50, 20, 22, 60}), run_with(4.2, {9, 26, 24, 90})}));
  EXPECT_EQ(
      table,
      "c.json | 4 steps | 2 seeds | 1 run at a time, 1 thread each\n\n"
      "recipe    loss         difference            change  cosine of gradients  ms a step  time  bytes per weight\n"
      "high    3.0000                                                         1       12.0  1.00                 2\n"
      "mxfp8   3.2000  +0.2000 +- 0.0000  +7.50 +- 31.77 %     0.9512 to 0.9900       24.0  2.00             3.001\n\n"
      "difference and change: mean over 2 pairs of equal seeds, +- Student's t at 95 %; an interval with 0 in it shows no difference\n"
      "least cosine of mxfp8: b.weight\n");
}

TEST(Comparison, OfOneSeedHasNoInterval) {
  const std::string table = comparison_table(comparison_of({run_with(2.0, {50, 10})}, {run_with(2.2, {50, 20})}));
  EXPECT_THAT(table, HasSubstr("3.001\n\ndifference and change have no interval: one seed tells nothing about others\n"));
  EXPECT_THAT(table, Not(HasSubstr("+-")));
  EXPECT_THAT(table, HasSubstr("  +0.2000  +10.00 %  "));
}

TEST(Comparison, IsOneObjectForPrograms) {
  const json found = json::parse(comparison_json(comparison_of({run_with(2.0, {5, 10})}, {run_with(2.5, {5, 20})})).dump());
  EXPECT_EQ(found["baseline"], "high");
  EXPECT_EQ(found["seeds"], 1);
  EXPECT_TRUE(found["recipes"][0]["difference"].is_null());
  const json& mxfp8 = found["recipes"][1];
  EXPECT_EQ(mxfp8["losses"], json({2.5}));
  EXPECT_EQ(mxfp8["difference"], (json{{"mean", 0.5}, {"half_width", nullptr}, {"pairs", 1}}));
  EXPECT_EQ(mxfp8["change"]["mean"], 0.25);
  EXPECT_EQ(mxfp8["cosines"]["b.weight"], 0.9512);
  EXPECT_EQ(mxfp8["ms_per_step"], 20);
}

// Layer 1 of the first run is the worst: 30 of 40 assignments over two reports go to one of two experts.
TEST(Comparison, HasTheLoadOfTheWorstLayer) {
  ComparedMetrics even = run_with(2.0, {5, 10}), uneven = even;
  even.metrics.routing = {{1, {{.layer = 0, .load = {10, 10}}, {.layer = 1, .load = {12, 8}}}}};
  uneven.metrics.routing = {{1, {{.layer = 0, .load = {10, 10}}, {.layer = 1, .load = {18, 2}}}},
                            {2, {{.layer = 0, .load = {10, 10}}, {.layer = 1, .load = {12, 8}}}}};
  const RecipeCost cost = tools::recipe_cost("high", plan_with("high"), {uneven, even});
  EXPECT_DOUBLE_EQ(cost.load.value(), 1.5);
  EXPECT_FALSE(tools::recipe_cost("high", plan_with("high"), {run_with(2.0, {5, 10})}).load);
  Comparison all{.name = "c.json", .recipes = {cost, cost}};
  compare_with_first(all.recipes);
  EXPECT_THAT(comparison_table(all), HasSubstr("  load\n"));
  EXPECT_THAT(comparison_table(all), HasSubstr("  1.50\n"));
}

TEST(Comparison, NeedsAValidationLoss) { EXPECT_THROW(tools::recipe_cost("high", plan_with("high"), {ComparedMetrics()}), Error); }

// Neither what runs beside a run nor its threads may differ where times are divided by each other.
TEST(Comparison, DividesTimesOfRunsThatWereMeasuredAlike) {
  const Measured two{.at_a_time = 2, .threads = 1};
  const Comparison alike = comparison_of({run_with(2.0, {5, 10}, two)}, {run_with(2.2, {5, 20}, two)});
  EXPECT_THAT(comparison_table(alike), HasSubstr("c.json | 4 steps | 1 seed | 2 runs at a time, 1 thread each\n"));
  EXPECT_EQ(json::parse(comparison_json(alike).dump())["at_a_time"], 2);
  for (const Measured other : {Measured{.at_a_time = 1, .threads = 1}, Measured{.at_a_time = 2, .threads = 2}}) {
    const Comparison unlike = comparison_of({run_with(2.0, {5, 10}, two)}, {run_with(2.2, {5, 20}, other)});
    const std::string table = comparison_table(unlike);
    EXPECT_THAT(table, HasSubstr("c.json | 4 steps | 1 seed\n"));
    EXPECT_THAT(table, HasSubstr("  10.0  1.00  "));
    EXPECT_THAT(table, HasSubstr("  20.0     -  "));
    EXPECT_THAT(table, HasSubstr(text("\ntimes were not measured alike (high 2 at a time with 1 thread, mxfp8 ", other.at_a_time,
                                      " at a time with ", other.threads, other.threads == 1 ? " thread" : " threads",
                                      "), so some have no ratio: for all, train all into another --output, with the same --jobs and ")));
    const json found = json::parse(comparison_json(unlike).dump());
    EXPECT_TRUE(found["at_a_time"].is_null());
    EXPECT_TRUE(found["recipes"][1]["time"].is_null());
    EXPECT_EQ(found["recipes"][1]["threads"], other.threads);
  }
}

// A run that was stopped and went on has the times of both processes.
TEST(Comparison, KnowsHowARunOfSeveralProcessesWasMeasured) {
  const Measured two{.at_a_time = 2, .threads = 1}, other{.at_a_time = 1, .threads = 2};
  EXPECT_EQ((tools::RunState{.starts = {two, two}}.measured()), two);
  EXPECT_FALSE((tools::RunState{.starts = {two, other}}.measured()));
  EXPECT_FALSE(tools::RunState().measured());
}

TEST(Comparison, HasNoTimeOfRunsThatWereMeasuredInDifferentWays) {
  const Measured two{.at_a_time = 2, .threads = 1};
  for (const std::optional<Measured> other : {std::optional(Measured()), std::optional<Measured>()}) {
    const std::string table = comparison_table(comparison_of({run_with(2.0, {5, 10}, two), run_with(2.0, {5, 10}, two)},
                                                             {run_with(2.2, {5, 20}, two), run_with(2.2, {5, 20}, other)}));
    EXPECT_THAT(table, HasSubstr("          -     -  "));
    EXPECT_THAT(table, HasSubstr("mxfp8 in different ways)"));
  }
  const RecipeCost one = tools::recipe_cost("high", plan_with("high"), {run_with(2.0, {5})});
  EXPECT_FALSE(one.milliseconds) << "a first step alone is no time of a step";
}

// The mean and the pairs are of what is left; the row and a note say what diverged.
TEST(Comparison, CountsRunsThatDiverged) {
  const std::vector<ComparedMetrics> high = {run_with(2.0, {5, 10}), run_with(3.0, {5, 10}), run_with(4.0, {5, 10})};
  const Comparison found = comparison_of(high, {run_with(2.2, {5, 20}), diverged_run(), run_with(4.4, {5, 20})});
  const RecipeCost& mxfp8 = found.recipes[1];
  EXPECT_DOUBLE_EQ(mxfp8.loss().value(), 3.3);
  EXPECT_EQ(mxfp8.diverged_seeds(), std::vector<int64_t>{2});
  EXPECT_EQ(mxfp8.difference->pairs, 2);
  EXPECT_NEAR(mxfp8.difference->mean, 0.3, 1e-12);
  EXPECT_NEAR(mxfp8.change->mean, 0.1, 1e-12);
  EXPECT_DOUBLE_EQ(mxfp8.milliseconds.value(), 20.0);
  const std::string table = comparison_table(found);
  EXPECT_THAT(table, HasSubstr("recipe  diverged    loss  "));
  EXPECT_THAT(table, HasSubstr("mxfp8     1 of 3  3.3000  +0.3000 +- 1.2706 (2 pairs)  "));
  EXPECT_THAT(table, HasSubstr("high      0 of 3  3.0000  "));
  EXPECT_THAT(table, HasSubstr("mean over the pairs of equal seeds"));
  EXPECT_THAT(table, HasSubstr("\ndiverged: mxfp8-seed2; losses and times are of the other runs"));
  const json written = json::parse(comparison_json(found).dump());
  EXPECT_EQ(written["recipes"][1]["losses"], (json{2.2, nullptr, 4.4}));
  EXPECT_EQ(written["recipes"][1]["diverged_seeds"], json({2}));
}

TEST(Comparison, TakesALossThatIsNotFiniteForADivergence) {
  const RecipeCost cost = tools::recipe_cost("high", plan_with("high"), {run_with(std::nan(""), {5, 10}), run_with(2.0, {5, 10})});
  EXPECT_EQ(cost.diverged_seeds(), std::vector<int64_t>{1});
}

TEST(Comparison, HasNoDifferenceWhereAllDiverged) {
  const std::string table = comparison_table(comparison_of({run_with(2.0, {5, 10})}, {diverged_run()}));
  EXPECT_THAT(table, HasSubstr("mxfp8     1 of 1       -           -       -  "));
  EXPECT_THAT(table, HasSubstr("1 run at a time, 1 thread each")) << "which has no time that could differ";
  const std::string none = comparison_table(comparison_of({diverged_run()}, {diverged_run()}));
  EXPECT_THAT(none, Not(HasSubstr("times were")));
}

TEST(Comparison, SaysWhatDiffersInLength) {
  Comparison found = comparison_of({run_with(2.0, {5, 10})}, {run_with(2.2, {5, 20})});
  for (RecipeCost& cost : found.recipes) cost.tokens_per_step = 64;
  EXPECT_THAT(comparison_table(found), Not(HasSubstr("tokens")));
  found.recipes[1].steps = 2;
  std::string table = comparison_table(found);
  EXPECT_THAT(table, HasSubstr("c.json | 2 to 4 steps | "));
  EXPECT_THAT(table, HasSubstr("recipe  steps    loss"));
  EXPECT_THAT(table, HasSubstr("\nrecipes train on different numbers of tokens: losses differ by that, too\n"));
  EXPECT_TRUE(json::parse(comparison_json(found).dump())["steps"].is_null());
  found.recipes[1].tokens_per_step = 128;  // as many in all
  table = comparison_table(found);
  EXPECT_THAT(table, HasSubstr("recipe  steps  tokens a step    loss"));
  EXPECT_THAT(table, Not(HasSubstr("recipes train on")));
  EXPECT_THAT(table, HasSubstr("\ntimes are of steps with different numbers of tokens\n"));
}

TEST(Comparison, SaysWhyThereIsNoCosine) {
  Comparison found = comparison_of({run_with(2.0, {5, 10})}, {run_with(2.2, {5, 20})});
  found.recipes[1].cosines.clear();
  found.recipes[1].no_cosines = "reason";
  EXPECT_THAT(comparison_table(found), HasSubstr("                   1  "));
  EXPECT_THAT(comparison_table(found), HasSubstr("  none  "));
  EXPECT_THAT(comparison_table(found), HasSubstr("\ncosine of mxfp8: none, since reason\n"));
  EXPECT_EQ(json::parse(comparison_json(found).dump())["recipes"][1]["no_cosines"], "reason");
}

TEST(Comparison, NamesTheWeightByWhichModelsDiffer) {
  const PrecisionPlan plan = plan_with("high");
  EXPECT_EQ(tools::tensor_difference(plan_with("mxfp8"), plan), "");
  EXPECT_EQ(tools::tensor_difference(plan_with("high", {{"intermediate_size", 96}}), plan),
            "layers.0.mlp.down is [64, 96], and [64, 64] in the baseline");
  EXPECT_EQ(tools::tensor_difference(plan_with("high", {{"num_layers", 2}}), plan), "the baseline has no layers.1.attn.out");
  EXPECT_EQ(tools::tensor_difference(plan, plan_with("high", {{"num_layers", 2}})), "it has no layers.1.attn.out");
}

// Beside a teacher the loss is not what training lowers.
TEST(Comparison, HasTheObjectiveBesideATeacher) {
  const auto taught = [](double loss, double divergence) {
    ComparedMetrics run = run_with(loss, {5, 10});
    run.metrics.valid_kl = {{1, 9.0}, {4, divergence}};
    return run;
  };
  const auto compared = [&](const tools::Learning& one, const tools::Learning& other) {
    Comparison out{.name = "c.json", .recipes = {}};
    out.recipes.push_back(recipe_cost("high", plan_with("high"), {taught(2.0, 0.5), taught(2.0, 0.25)}, one));
    out.recipes.push_back(recipe_cost("mxfp8", plan_with("mxfp8"), {taught(2.4, 0.75), diverged_run()}, other));
    compare_with_first(out.recipes);
    return out;
  };
  const Comparison found = compared({.teacher = "a"}, {.teacher = "a"});
  EXPECT_DOUBLE_EQ(found.recipes[0].objective().value(), 0.375);
  EXPECT_DOUBLE_EQ(found.recipes[1].objective_difference->mean, 0.25) << "of the pair that did not diverge";
  const std::string table = comparison_table(found);
  EXPECT_THAT(table, HasSubstr("      kl    its difference    loss        difference  "));
  EXPECT_THAT(table, HasSubstr("  0.7500  +0.2500 (1 pair)  2.4000  +0.4000 (1 pair)  "));
  EXPECT_THAT(table,
              HasSubstr("\nkl: validation of what the runs are trained for, at temperature 1; loss: the cross entropy of the targets\n"));
  const json written = json::parse(comparison_json(found).dump());
  EXPECT_EQ(written["objective"], "kl");
  EXPECT_EQ(written["recipes"][1]["objectives"], (json{0.75, nullptr}));
  const json weighted = json::parse(comparison_json(compared({"a", 0.5}, {"a", 0.5})).dump());
  EXPECT_EQ(weighted["objective"], "0.5 kl + 0.5 loss");
  EXPECT_EQ(weighted["recipes"][1]["objective"], 0.5 * 0.75 + 0.5 * 2.4);
  for (const tools::Learning& other : {tools::Learning{"b", 0.5}, tools::Learning{"a", 1.0}}) {
    const Comparison unlike = compared({"a", 0.5}, other);
    EXPECT_EQ(json::parse(comparison_json(unlike).dump())["objective"], "loss");
    EXPECT_FALSE(unlike.recipes[1].objective_difference);
    EXPECT_THAT(comparison_table(unlike),
                HasSubstr("\nrecipes learn from different teachers, or with different teacher_weight: only the "));
  }
  EXPECT_THAT(comparison_table(comparison_of({run_with(2.0, {5})}, {run_with(2.0, {5})})), Not(HasSubstr("teacher")));
}

TEST(Comparison, IsATableOfAPage) {
  const json page = json::parse(comparison_page(comparison_of({run_with(2.0, {5, 10})}, {run_with(2.2, {5, 20})})).dump());
  EXPECT_EQ(page["title"], "c.json | 4 steps | 1 seed | 1 run at a time, 1 thread each");
  EXPECT_EQ(page["head"][1], "loss");
  EXPECT_EQ(page["rows"][1], (json{"mxfp8", "2.2000", "+0.2000", "+10.00 %", "0.9512 to 0.9900", "20.0", "2.00", "3.001"}));
  EXPECT_EQ(page["notes"].back(), "least cosine of mxfp8: b.weight");
}

}  // namespace mantissa::comparison_test
