// From the precision plan of a run to its model, and to what a checkpoint says of it.
#pragma once

#include <string>
#include <vector>

#include "mantissa/models/gpt.h"
#include "mantissa/train/config.h"

namespace mantissa {

// A model that computes and stores what the plan of `config` says. model.vocab_size must be set. Throws as resolve_plan().
GptOptions model_options(const RunConfig& config, Recompute recompute, bool gradients);

// The manifest's "plan": PrecisionPlan::to_json() and, by parameter that is kept as codes, how, the xxh64 of codes followed by scales
// ("codes") and of the dequantised fp32 values ("values"). The hash of the values outlives requantisation, where a scale may drop by one.
std::string plan_manifest(const RunConfig& config, const ParameterSet& parameters);

// "layers.{0..1}.attn.qkv: mxfp8 -> high" for modules whose products read other formats under `config` than in the manifest's plan. Throws
// Error(usage) that names them, unless checkpoint.allow_recipe_change; the output projection may always differ: its parameter is high
// precision either way. Throws Error(data) if `saved` is no plan of this model.
std::vector<std::string> allowed_plan_changes(const std::string& saved, const RunConfig& config, const std::string& source);

std::string precision_text(const PrecisionConfig& config);  // "bf16, mxfp8, 2 rules, fp8_output_proj"
void log_plan_warnings(const RunConfig& config);

// What a checkpoint is loaded for; use: a new run from its weights, evaluation, generation.
enum class LoadFor { resume, use };

// Compares the codes, made from the loaded masters, with those of the manifest's plan: of every weight that has the formats it had then.
// Throws Error(data) that names the first that differs; on a resume with checkpoint.allow_recipe_change that is a warning. It is no
// CheckpointDamage: older checkpoints would differ alike where it is this build that quantises otherwise, so a search for a good one ends.
void require_same_codes(const std::string& saved, const RunConfig& config, const ParameterSet& parameters, const std::string& source,
                        LoadFor purpose);

}  // namespace mantissa
