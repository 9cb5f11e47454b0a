// Summarizes what the routers of a step did.
#pragma once

#include <span>
#include <vector>

#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"
#include "mantissa/metrics/events.h"
#include "nn/moe.h"

namespace mantissa {

// Returns one entry for each layer with experts, over the micro batches of all ranks, which want the same figures (RouterStatistics, those
// of this rank). It has the same bits for any number of ranks.
std::vector<LayerRouting> routing_summary(std::span<const double> figures, RouterFigures wanted, const RunConfig& config,
                                          const Communicator& ranks);

// Returns how many fp64 numbers each rank then sends the others, in one exchange.
int64_t routing_numbers(const RunConfig& config);

}  // namespace mantissa
