// Recipes on a saved model as `mantissa analyze` measures them, and how it
// shows them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mantissa/json/json.h"
#include "train/analyze.h"
#include "train/recipe_losses.h"

namespace mantissa::tools {

// A part of the model alone in a recipe.
struct PartLoss {
  size_t part = 0;  // number in Analysis::parts
  std::string recipe;
  int64_t bytes = 0;
  RecipeLoss loss = {};
};

struct ProposedRules {
  Proposal proposal;
  std::string file;      // text for --set-file
  RecipeLoss loss = {};  // loss of the model under these rules
};

struct Analysis {
  std::string model;
  std::optional<int64_t> step = {};  // step of a checkpoint
  ExaminedRecipe high;
  std::vector<ExaminedRecipe> recipes;
  std::vector<ExaminedWeight> weights = {};
  std::string data = {};                                                // "" without data
  int64_t window = 0;                                                   // tokens of a window of the data
  std::optional<RecipeLoss> high_loss = {};                             // with data
  std::vector<RecipeLoss> losses = {};                                  // by recipe, with data; unset for one that fits nothing
  std::vector<ModelPart> parts = {};                                    // with --modules or --budget
  std::vector<PartLoss> part_losses = {};                               // from the largest KL to the least
  std::vector<std::pair<std::string, std::string>> without_table = {};  // recipes that cannot round the table of tokens, and why
  std::optional<ProposedRules> proposed = {};                           // with --budget
};

void print_analysis(const Analysis& analysis, bool wide);
Json analysis_json(const Analysis& analysis);

}  // namespace mantissa::tools
