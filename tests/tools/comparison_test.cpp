// The table and the JSON of `mantissa compare`, from metrics of runs that are made up.
#include "tools/compare/comparison.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "mantissa/train/load_config.h"
#include "testing.h"

namespace mantissa::comparison_test {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::Not;
using tools::Comparison;
using tools::RecipeCost;

PrecisionPlan plan_with(const std::string& recipe) {
  const json model = {{"vocab_size", 64}, {"hidden_size", 64}, {"num_layers", 1}, {"num_attention_heads", 2}, {"intermediate_size", 64}};
  const json all = {{"model", model}, {"precision", {{"dtype", "bf16"}, {"recipe", recipe}}}, {"data", {{"path", "none"}}}};
  return resolve_plan(load_run_config({.file = "c.json", .text = all.dump(), .set_files = {}, .sets = {}}, Inputs::unchecked, 1).config);
}

RunMetrics run_with(double loss, const std::vector<double>& milliseconds) {
  RunMetrics run;
  run.name = "run";
  run.starts = {0};
  run.valid_loss = {{1, 9.0}, {4, loss}};
  for (size_t i = 0; i < milliseconds.size(); ++i) run.milliseconds.push_back({static_cast<int64_t>(i) + 1, milliseconds[i]});
  return run;
}

Comparison comparison_of(const std::vector<RunMetrics>& high, const std::vector<RunMetrics>& mxfp8) {
  Comparison out{.name = "c.json", .steps = 4, .recipes = {}};
  out.recipes.push_back(tools::recipe_cost("high", plan_with("high"), high));
  out.recipes.push_back(tools::recipe_cost("mxfp8", plan_with("mxfp8"), mxfp8));
  out.recipes.back().cosines = {{"a.weight", 0.99}, {"b.weight", 0.9512}};
  compare_with_first(out.recipes);
  return out;
}

TEST(Comparison, HasTheFiguresOfTheRuns) {
  const Comparison found = comparison_of({run_with(2.0, {50, 10, 11, 30}), run_with(4.0, {9, 13, 12, 90})},
                                         {run_with(2.2, {50, 20, 22, 60}), run_with(4.2, {9, 26, 24, 90})});
  const auto& [high, mxfp8] = std::tie(found.recipes[0], found.recipes[1]);
  EXPECT_DOUBLE_EQ(high.loss(), 3.0);
  EXPECT_DOUBLE_EQ(high.milliseconds, 12.0) << "medians without the first step: 11 and 13";
  EXPECT_DOUBLE_EQ(high.bytes_per_weight, 2.0);
  EXPECT_NEAR(mxfp8.bytes_per_weight, 3.001, 1e-3);
  EXPECT_NEAR(mxfp8.difference.mean, 0.2, 1e-12);
  EXPECT_NEAR(mxfp8.difference.half_width.value(), 0.0, 1e-9) << "both seeds differ by as much";
  EXPECT_NEAR(mxfp8.change.mean, (0.1 + 0.05) / 2, 1e-12);
  EXPECT_NEAR(mxfp8.change.half_width.value(), 12.7062 * 0.05 / 2, 1e-4);
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
  RunMetrics even = run_with(2.0, {5, 10}), uneven = even;
  even.routing = {{1, {{.layer = 0, .load = {10, 10}}, {.layer = 1, .load = {12, 8}}}}};
  uneven.routing = {{1, {{.layer = 0, .load = {10, 10}}, {.layer = 1, .load = {18, 2}}}},
                    {2, {{.layer = 0, .load = {10, 10}}, {.layer = 1, .load = {12, 8}}}}};
  const RecipeCost cost = tools::recipe_cost("high", plan_with("high"), {uneven, even});
  EXPECT_DOUBLE_EQ(cost.load.value(), 1.5);
  EXPECT_FALSE(tools::recipe_cost("high", plan_with("high"), {run_with(2.0, {5, 10})}).load);
  Comparison all{.name = "c.json", .steps = 4, .recipes = {cost, cost}};
  compare_with_first(all.recipes);
  EXPECT_THAT(comparison_table(all), HasSubstr("  load\n"));
  EXPECT_THAT(comparison_table(all), HasSubstr("  1.50\n"));
}

TEST(Comparison, NeedsAValidationLoss) {
  EXPECT_THROW(tools::recipe_cost("high", plan_with("high"), {RunMetrics()}), Error);
}

}  // namespace mantissa::comparison_test
