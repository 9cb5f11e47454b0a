// Recipes for the parts of a model by what each costs alone.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <random>

#include "error_messages.h"
#include "models/model_shape.h"
#include "testing.h"
#include "train/analyze.h"

namespace mantissa::budget_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

PrecisionPlan plan_of(int64_t layers) {
  ModelConfig config;
  config.vocab_size = 64;
  config.hidden_size = 32;
  config.num_layers = layers;
  config.num_attention_heads = 2;
  config.intermediate_size = 64;
  ConfigReport report;
  PrecisionPlan plan = PrecisionPlan::resolve({}, model_shape(config), report);
  report.throw_if_failed();
  return plan;
}

TEST(ModelParts, AreLinearsOrNeighboringLayersOfThem) {
  const std::vector<ModelPart> single = model_parts(plan_of(3), 1000);
  EXPECT_EQ(single.size(), 12U);
  EXPECT_THAT(single[0].modules, ElementsAre("layers.0.attn.qkv"));
  EXPECT_EQ(single[0].elements, 3 * 32 * 32);
  EXPECT_EQ(single[0].high_bytes, 2 * 3 * 32 * 32);
  const std::vector<ModelPart> pairs = model_parts(plan_of(5), 10);
  EXPECT_EQ(pairs.size(), 8U) << "two for each of four kinds";
  EXPECT_THAT(pairs[2].modules, ElementsAre("layers.0.attn.out", "layers.1.attn.out"));
  EXPECT_THAT(pairs[3].modules, ElementsAre("layers.2.attn.out", "layers.3.attn.out", "layers.4.attn.out"));
  EXPECT_EQ(pairs[3].elements, 3 * 32 * 32);
  EXPECT_EQ(model_parts(plan_of(5), 1).size(), 4U);
}

// Three parts of 100 weights.
std::vector<ModelPart> three() {
  std::vector<ModelPart> parts;
  for (const char* const name : {"layers.0.mlp.down", "layers.1.mlp.down", "layers.2.mlp.down"})
    parts.push_back({.modules = {name}, .elements = 100, .high_bytes = 200});
  return parts;
}

TEST(Budget, TakesWhatCostsLeastForEachByte) {
  // The first saves 100 bytes for 1, the second 150 for 1.2; the third would save most for 3.
  const std::vector<PartInRecipe> choices = {{.part = 0, .recipe = "eight", .bytes = 100, .cost = 1.0},
                                             {.part = 1, .recipe = "four", .bytes = 50, .cost = 1.2},
                                             {.part = 2, .recipe = "four", .bytes = 50, .cost = 3.0}};
  const auto recipes = [&](double bits) { return propose(three(), choices, bits).recipes; };
  EXPECT_THAT(recipes(16), ElementsAre("high", "high", "high"));
  EXPECT_THAT(recipes(15.9), ElementsAre("eight", "high", "high")) << "saves less than the second part, and is enough";
  EXPECT_THAT(recipes(12), ElementsAre("high", "four", "high"));
  EXPECT_THAT(recipes(11.9), ElementsAre("eight", "four", "high"));
  const Proposal all = propose(three(), choices, 5.4);
  EXPECT_THAT(all.recipes, ElementsAre("eight", "four", "four"));
  EXPECT_DOUBLE_EQ(all.bits, 8.0 * 200 / 300);
  EXPECT_DOUBLE_EQ(all.cost, 5.2);
  const Error none = test::error_of([&] { propose(three(), choices, 5.3); });
  EXPECT_EQ(none.code(), ExitCode::usage);
  EXPECT_THAT(none.what(), HasSubstr("the recipes reach no fewer than 5.333"));
}

// From 8 to 4 bits the first part saves 50 bytes for 0.45, which is less for each than the 100 bytes of the second for 1.
TEST(Budget, AStepMayGoOnFromAnEarlierOne) {
  std::vector<ModelPart> parts = three();
  parts.pop_back();
  const std::vector<PartInRecipe> choices = {{.part = 0, .recipe = "eight", .bytes = 100, .cost = 0.1},
                                             {.part = 0, .recipe = "four", .bytes = 50, .cost = 0.55},
                                             {.part = 1, .recipe = "eight", .bytes = 100, .cost = 1.0}};
  EXPECT_THAT(propose(parts, choices, 12).recipes, ElementsAre("eight", "high"));
  EXPECT_THAT(propose(parts, choices, 10).recipes, ElementsAre("four", "high"));
  EXPECT_NEAR(propose(parts, choices, 10).cost, 0.55, 1e-15) << "the cost of the last step alone";
  EXPECT_THAT(propose(parts, choices, 6).recipes, ElementsAre("four", "eight"));
}

// The third part saves most for each byte and overshoots by 90 bytes, for which the first two have their values again.
TEST(Budget, IsSpent) {
  const std::vector<PartInRecipe> choices = {{.part = 0, .recipe = "eight", .bytes = 160, .cost = 0.1},
                                             {.part = 1, .recipe = "eight", .bytes = 160, .cost = 0.2},
                                             {.part = 2, .recipe = "four", .bytes = 50, .cost = 1.0}};
  const Proposal proposal = propose(three(), choices, 8.0 * 460 / 300);
  EXPECT_THAT(proposal.recipes, ElementsAre("high", "high", "four"));
  EXPECT_DOUBLE_EQ(proposal.bits, 8.0 * 450 / 300);
  EXPECT_DOUBLE_EQ(proposal.cost, 1.0);
}

// No change of one part or of two lowers the cost within the budget, and the figures are those of the recipes.
TEST(Budget, LeavesNothingThatOneOrTwoPartsWouldGain) {
  std::mt19937 random(7);
  const auto below = [&](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
  for (int round = 0; round < 200; ++round) {
    std::vector<ModelPart> parts;
    std::vector<PartInRecipe> choices;
    int64_t most = 0, elements = 0;
    for (size_t i = 0; i < 6; ++i) {
      const int64_t size = 32 * (1 + below(20));
      parts.push_back({.modules = {text("layers.", i, ".mlp.down")}, .elements = size, .high_bytes = 2 * size});
      for (const auto& [recipe, share] : {std::pair("eight", 32), {"four", 17}})
        choices.push_back({.part = i, .recipe = recipe, .bytes = size * share / 32, .cost = below(1000) / 1000.0});
      most += 2 * size, elements += size;
    }
    const double bits = 4.5 + below(110) / 10.0;
    const Proposal proposal = propose(parts, choices, bits);
    const auto room = static_cast<int64_t>(bits * static_cast<double>(elements) / 8.0);
    const auto figures = [&](const std::vector<std::string>& recipes) {
      std::pair<int64_t, double> out;
      for (size_t i = 0; i < parts.size(); ++i) {
        const auto own =
            std::ranges::find_if(choices, [&](const PartInRecipe& choice) { return choice.part == i && choice.recipe == recipes[i]; });
        out.first += own == choices.end() ? parts[i].high_bytes : own->bytes;
        out.second += own == choices.end() ? 0.0 : own->cost;
      }
      return out;
    };
    const auto [bytes, cost] = figures(proposal.recipes);
    EXPECT_LE(bytes, room);
    EXPECT_DOUBLE_EQ(proposal.bits, 8.0 * static_cast<double>(bytes) / static_cast<double>(elements));
    EXPECT_NEAR(proposal.cost, cost, 1e-12);
    for (size_t a = 0; a < 36; ++a) {
      for (const char* const first : {"high", "eight", "four"}) {
        for (const char* const second : {"high", "eight", "four"}) {
          std::vector<std::string> other = proposal.recipes;
          other[a / 6] = first, other[a % 6] = second;
          const auto [other_bytes, other_cost] = figures(other);
          EXPECT_TRUE(other_bytes > room || other_cost >= cost - 1e-12) << "round " << round << ": " << joined(other);
        }
      }
    }
  }
}

TEST(Budget, AProposalIsASectionOfRules) {
  PrecisionConfig precision;
  precision.recipes["mine"].base = "mxfp4_qat";
  precision.recipes["unused"].base = "mxfp8";
  const auto file = [&](std::vector<std::string> recipes) {
    return nlohmann::json::parse(proposal_text(three(), {.recipes = std::move(recipes), .bits = 5, .cost = 1}, precision));
  };
  const nlohmann::json mixed = file({"mine", "high", "mine"});
  EXPECT_EQ(mixed.size(), 1U);
  EXPECT_EQ(mixed["precision"]["recipe"], "mine");
  EXPECT_EQ(mixed["precision"]["rules"], nlohmann::json::parse(R"([{"match": "layers.1.mlp.down", "recipe": "high"}])"));
  EXPECT_EQ(mixed["precision"]["recipes"].size(), 1U);
  EXPECT_EQ(mixed["precision"]["recipes"]["mine"]["base"], "mxfp4_qat");
  const nlohmann::json all = file({"mxfp8", "mxfp8", "mxfp8"});
  EXPECT_EQ(all, nlohmann::json::parse(R"({"precision": {"recipe": "mxfp8", "rules": []}})"));
  EXPECT_EQ(file({"high", "mxfp8", "mxfp8"})["precision"]["rules"][0]["match"], "layers.0.mlp.down");
}

}  // namespace mantissa::budget_test
