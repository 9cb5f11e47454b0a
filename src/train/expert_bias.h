// Balances experts without a loss (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3), by biases that follow from the load.
#pragma once

#include <span>
#include <vector>

#include "mantissa/nn/moe.h"

namespace mantissa {

// Returns the assignments of each expert in micro batches of these figures (RouterStatistics), before any was dropped, layer by layer, as
// whole numbers. Empty for a set without expert biases.
std::vector<double> expert_assignments(const ParameterSet& parameters, std::span<const double> figures);

// Updates the biases after a step: each falls by `rate` if its expert has more assignments than the mean of its layer, and rises by it if
// fewer. `assignments` are those of all data ranks, summed.
void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& assignments);

}  // namespace mantissa
