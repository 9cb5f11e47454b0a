// What a checkpoint says of the precision plan of its run, and how a run compares its own with it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/nn/parameter.h"
#include "mantissa/precision/code_hash.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// What a checkpoint is loaded for; resume_changed: under checkpoint.allow_recipe_change; use: a new run from its weights, evaluation,
// generation.
enum class LoadFor { resume, resume_changed, use };

// The codes of a weight, told by their sums (code_hash.h).
struct WeightCodes {
  std::string how;             // "e4m3 32x32 rceil"
  std::vector<CodeSums> sums;  // of a stack one for each expert
};
using CodesByWeight = std::map<std::string, WeightCodes>;  // by parameter that is kept as codes

// From the parts that this rank owns, together with those of the others: a call of all of them.
CodesByWeight codes_by_weight(const ParameterSet& parameters, const PrecisionPlan& plan, const std::vector<Part>& own,
                              const Communicator& ranks = {});

// The manifest's "plan": PrecisionPlan::to_json() and the codes by parameter: how, "codes_sum", "values_sum" and, of a stack, what these
// are sums of: "codes_by_expert", "values_by_expert". The sum of the values outlives requantisation, where a scale may drop by one.
std::string plan_manifest(const PrecisionPlan& plan, const CodesByWeight& codes);

// "layers.{0..1}.attn.qkv: mxfp8 -> high" for modules whose products read other formats under `plan` than in the manifest's. Throws
// Error(usage) that names them, unless resume_changed; the output projection may always differ: its parameter is high precision either way.
// Throws Error(data) if `saved` is no plan of this model.
std::vector<std::string> allowed_plan_changes(const std::string& saved, const PrecisionPlan& plan, const std::string& source,
                                              LoadFor purpose);

std::string precision_text(const PrecisionConfig& config);  // "bf16, mxfp8, 2 rules, fp8_output_proj"

// Compares the codes, made from the loaded masters, with those of the manifest's plan: of every weight that has the formats it had then.
// Throws Error(data) that names the first that differs, and of a stack its experts; a warning for resume_changed. It is no
// CheckpointDamage: older checkpoints would differ alike where it is this build that quantises otherwise, so a search for a good one ends.
void require_same_codes(const std::string& saved, const PrecisionPlan& plan, const CodesByWeight& codes, const std::string& source,
                        LoadFor purpose);

// Weights whose codes are of one kind in both manifests' plans and differ, and how: "e4m3 32x32 rceil, experts 1, 3 of 8".
struct CodesDifference {
  std::string weight, what;
};
std::vector<CodesDifference> codes_that_differ(const std::string& plan, const std::string& other);

}  // namespace mantissa
