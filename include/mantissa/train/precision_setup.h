// What a checkpoint says of the precision plan of its run, and how a run compares its own with it.
#pragma once

#include <string>
#include <vector>

#include "mantissa/nn/parameter.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// What a checkpoint is loaded for; resume_changed: under checkpoint.allow_recipe_change; use: a new run from its weights, evaluation,
// generation.
enum class LoadFor { resume, resume_changed, use };

// The manifest's "plan": PrecisionPlan::to_json() and, by parameter that is kept as codes, how, the xxh64 of codes followed by scales
// ("codes") and of the dequantised fp32 values ("values"). The hash of the values outlives requantisation, where a scale may drop by one.
std::string plan_manifest(const PrecisionPlan& plan, const ParameterSet& parameters);

// "layers.{0..1}.attn.qkv: mxfp8 -> high" for modules whose products read other formats under `plan` than in the manifest's. Throws
// Error(usage) that names them, unless resume_changed; the output projection may always differ: its parameter is high precision either way.
// Throws Error(data) if `saved` is no plan of this model.
std::vector<std::string> allowed_plan_changes(const std::string& saved, const PrecisionPlan& plan, const std::string& source,
                                              LoadFor purpose);

std::string precision_text(const PrecisionConfig& config);  // "bf16, mxfp8, 2 rules, fp8_output_proj"

// Compares the codes, made from the loaded masters, with those of the manifest's plan: of every weight that has the formats it had then.
// Throws Error(data) that names the first that differs; a warning for resume_changed. It is no
// CheckpointDamage: older checkpoints would differ alike where it is this build that quantises otherwise, so a search for a good one ends.
void require_same_codes(const std::string& saved, const PrecisionPlan& plan, const ParameterSet& parameters, const std::string& source,
                        LoadFor purpose);

}  // namespace mantissa
