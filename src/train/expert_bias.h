// Balance of experts without a loss (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3): what the biases of a step follow from.
#pragma once

#include <vector>

#include "mantissa/nn/moe.h"

namespace mantissa {

// How often each expert was chosen, before any choice was dropped, over these micro batches, layer by layer; whole numbers. Empty for a set
// without expert biases.
std::vector<double> expert_choices(const ParameterSet& parameters, const RoutingTally& tally);

// After a step: each bias falls by `rate` where its expert was chosen more often than the mean of its layer, and rises by it where less
// often. `choices`: of all data ranks, added up.
void update_expert_biases(ParameterSet& parameters, double rate, const std::vector<double>& choices);

}  // namespace mantissa
