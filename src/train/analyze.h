// Examines a saved model under several recipes without training it, and chooses a recipe for each part of a model, so that its linears take
// so many bits a weight and lose little.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "hf/load_model.h"
#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"
#include "metrics/weight_errors.h"

namespace mantissa {

struct ExaminedRecipe {
  std::string name;
  std::vector<std::string> values;  // values of section "precision" by which eval and export use the model so
  PrecisionPlan plan;
  // Linears whose sizes are no whole blocks of the recipe: they stay in high precision. The message about all of them.
  std::vector<std::string> misfits = {};
  std::string problem = {};
  bool fits = true;  // some linear, else values and plan are those of high precision
};

// Returns the plans of a model under recipes of these names, each as the ambient recipe. Rules and output projection are those of `more`,
// further values of section "precision", and not those of the model, which was trained by them. Throws Error(usage), before any weight is
// read, for names that are no recipes, for what with_precision() refuses, and if none of the recipes fits a linear.
std::vector<ExaminedRecipe> examined_recipes(const RunConfig& config, bool of_folder, const std::vector<std::string>& names,
                                             const ModelUse& more);

// Returns the configuration by which a model is used under further values of section "precision"; rules and output projection are no others
// than those. examined_values() are the values that make it.
RunConfig examined_config(const RunConfig& config, bool of_folder, const ModelUse& more);
std::vector<std::string> examined_values(const ModelUse& more);
std::string rules_value(const std::vector<RuleConfig>& rules);  // "precision.rules=[...]"

// Returns patterns that match the chosen ones of these paths and no others: "layers.{0,3}.mlp.down", "layers.*.attn.qkv".
std::vector<std::string> patterns_of(const std::vector<std::string>& chosen, const std::vector<std::string>& all);

struct ExaminedWeight {
  std::string module;
  std::vector<std::optional<WeightError>> errors;  // by recipe; none: it is not quantized
};

// Measures the weights that some of the recipes quantize, in the order of the model. Memory is one matrix in bf16 and its codes. Throws
// Error(data) for a weight that is NaN or Inf.
std::vector<ExaminedWeight> weight_errors(TensorReader& source, const std::vector<ExaminedRecipe>& recipes, Backend& device);

// Bytes of a model's weights as a plan keeps them in a file: codes and scales of those that it quantizes, other values in their types.
struct StoredSize {
  int64_t elements = 0, bytes = 0;
  double bits() const { return 8.0 * static_cast<double>(bytes) / static_cast<double>(elements); }
};
StoredSize stored_size(const PrecisionPlan& plan, bool linears_alone);

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
// that is saved, until the mean is at most `bits`; then changes the recipes of one or two parts at a time as long as the cost falls and the
// mean is still at most `bits`. Throws Error(usage) that names the least that the recipes reach.
Proposal propose(const std::vector<ModelPart>& parts, const std::vector<PartInRecipe>& choices, double bits);

// Returns the section "precision" that a proposal stands for, as JSON for --set-file, with the recipes of `precision` that it names. The
// recipe of most linears is the ambient one.
std::string proposal_text(const std::vector<ModelPart>& parts, const Proposal& proposal, const PrecisionConfig& precision);

}  // namespace mantissa
