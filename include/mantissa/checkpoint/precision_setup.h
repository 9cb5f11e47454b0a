// Records the precision plan of a run in its checkpoints, and compares it with that of the run that loads one.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/nn/parameter.h"
#include "mantissa/precision/code_hash.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// Says what a checkpoint is loaded for. resume_changed: under checkpoint.allow_recipe_change; use: a new run from its weights, evaluation,
// generation.
enum class LoadFor { resume, resume_changed, use };

// Identifies the codes of a weight by their sums (code_hash.h).
struct WeightCodes {
  std::string how;             // "e4m3 32x32 rceil"
  std::vector<CodeSums> sums;  // one, or for a grouped weight one for each expert
};
using CodesByWeight = std::map<std::string, WeightCodes>;  // by parameter that is kept as codes

// Hashes the shards that this rank owns and sums over all ranks, which call it together.
CodesByWeight codes_by_weight(const ParameterSet& parameters, const PrecisionPlan& plan, const std::vector<ParameterShard>& own,
                              const Communicator& ranks = {});

// Returns the manifest's "plan": PrecisionPlan::to_json() and, by parameter, how its codes are made, "codes_sum", "values_sum" and, of a
// grouped weight, the sums by expert: "codes_by_expert", "values_by_expert". The sum of the values survives requantization, where a scale
// may drop by one.
std::string plan_manifest(const PrecisionPlan& plan, const CodesByWeight& codes);

// Returns "layers.{0..1}.attn.qkv: mxfp8 -> high" for modules whose GEMMs read other formats under `plan` than in the manifest's. Throws
// Error(usage) that names them, unless resume_changed; the output projection may always differ, because its parameter is high precision
// either way. Throws Error(data) if `saved` is no plan of this model.
std::vector<std::string> allowed_plan_changes(const std::string& saved, const PrecisionPlan& plan, const std::string& source,
                                              LoadFor purpose);

std::string precision_text(const PrecisionConfig& config);  // "bf16, mxfp8, 2 rules, fp8_output_proj"

// Compares the codes, made from the loaded masters, with those of the manifest's plan, for every weight that has the formats it had then.
// Throws Error(data) that names the first that differs, and of a grouped weight its experts; only warns for resume_changed. This is no
// CheckpointDamage: if this build quantizes differently, older checkpoints would differ as well, so the search for a good one ends.
void require_same_codes(const std::string& saved, const PrecisionPlan& plan, const CodesByWeight& codes, const std::string& source,
                        LoadFor purpose);

// Returns the weights whose codes have the same format in both manifests' plans but differ, and how: "e4m3 32x32 rceil, experts 1, 3 of 8".
struct CodesDifference {
  std::string weight, what;
};
std::vector<CodesDifference> codes_that_differ(const std::string& plan, const std::string& other);

}  // namespace mantissa
