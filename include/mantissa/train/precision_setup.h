// From the precision plan of a run to its model, and to what a checkpoint says of it.
#pragma once

#include <string>

#include "mantissa/models/gpt.h"
#include "mantissa/train/config.h"

namespace mantissa {

// A model that computes and stores what the plan of `config` says. model.vocab_size must be set. Throws as resolve_plan().
GptOptions model_options(const RunConfig& config, Recompute recompute, bool gradients);

// The manifest's "plan": PrecisionPlan::to_json() and, by parameter that is kept as codes, how, the xxh64 of codes followed by scales
// ("codes") and of the dequantised fp32 values ("values"). The hash of the values outlives requantisation, where a scale may drop by one.
std::string plan_manifest(const RunConfig& config, const ParameterSet& parameters);

// Throws Error(usage) that names modules whose products read other formats in the manifest's plan than under `config`. The output
// projection may differ: its parameter is high precision either way.
void require_same_plan(const std::string& saved, const RunConfig& config, const std::string& source);

}  // namespace mantissa
