// Chooses a recipe for each part of a model, so that its linears take so many bits a weight and lose little.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/analyze.h"

namespace mantissa {

// Linears that are quantized together: one, or the same of neighboring layers.
struct ModelPart {
  std::vector<std::string> modules;
  int64_t elements = 0, high_bytes = 0;  // elements of their weights, and bytes of these in high precision
};

// Divides the linears of a plan into parts, at most `most`, but at least one for each kind of linear; every part has neighboring layers, as
// many as the others of its kind or one more. The order is that of the model.
std::vector<ModelPart> model_parts(const PrecisionPlan& plan, int64_t most);

// A part alone in a recipe, all others in high precision.
struct PartInRecipe {
  size_t part = 0;
  std::string recipe;
  int64_t bytes = 0;
  double cost = 0.0;  // loss of the model by it, in any unit that adds up
};

struct Proposal {
  std::vector<std::string> recipes;  // by part; "high" where it keeps its values
  double bits = 0.0;                 // per weight of the linears
  double cost = 0.0;                 // the sum of those of the parts
};

// Begins with all parts in high precision and gives, again and again, the part its next recipe where the cost rises least for each byte
// that is saved, until the mean is at most `bits`. Throws Error(usage) that names the least that the recipes reach.
Proposal propose(const std::vector<ModelPart>& parts, const std::vector<PartInRecipe>& choices, double bits);

// Returns the section "precision" that a proposal stands for, as JSON for --set-file, with the recipes of `precision` that it names. The
// recipe of most linears is the ambient one.
std::string proposal_text(const std::vector<ModelPart>& parts, const Proposal& proposal, const PrecisionConfig& precision);

}  // namespace mantissa
