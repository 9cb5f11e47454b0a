// Counts what ranks that share a model's layers send each other in forward and backward of one micro batch, as src/ops does it.
#pragma once

#include "mantissa/config/run_config.h"

namespace mantissa {

struct Exchanges {
  int64_t calls = 0;
  int64_t bytes = 0;    // sent by all ranks that share them
  int64_t control = 0;  // numbers of rows, beside them
  int64_t busiest = 0;  // of one rank, the more of what it sends and receives
};
// Counts for the tensor ranks of one replica.
Exchanges tensor_exchanges(const RunConfig& config, const PrecisionPlan& plan);
// Counts for the ranks that share experts, each with a micro batch, if every expert gets equally many rows of each (parallel.expert).
Exchanges expert_exchanges(const RunConfig& config, const PrecisionPlan& plan);

}  // namespace mantissa
