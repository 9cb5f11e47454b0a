// What the routers of a step did, in short.
#pragma once

#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"
#include "mantissa/nn/moe.h"

namespace mantissa {

// One entry for each layer with experts, over the micro batches of all ranks, which want the same figures. However many ranks the same
// micro batches are of, it has the same bits.
std::vector<LayerRouting> routing_summary(const RoutingTally& tally, const RunConfig& config, const Communicator& ranks);

// How many fp64 numbers each rank then tells the others, in one exchange.
int64_t routing_numbers(const RunConfig& config);

}  // namespace mantissa
