// What the routers of a step did, in short.
#pragma once

#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/nn/moe.h"
#include "mantissa/train/config.h"
#include "mantissa/train/events.h"

namespace mantissa {

// One entry for each layer with experts, over the micro batches of all ranks: these sum what they tell. They want the same figures.
std::vector<LayerRouting> routing_summary(const RoutingTally& tally, const RunConfig& config, const Communicator& ranks);

// How many fp64 numbers each rank then tells the others, in one exchange.
int64_t routing_numbers(const ModelConfig& model);

}  // namespace mantissa
