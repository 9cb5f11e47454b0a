// Refuses a run that its hosts have no memory for, before any of it is allocated.
#pragma once

#include <vector>

#include "mantissa/base/free_memory.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// A call of all ranks. Throws Error(environment) on all if what estimate_memory() says for the ranks of any host, or of a control group
// with a limit, is more than `free` there; unless training.allow_memory_overcommit.
void require_free_memory(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                         const std::vector<FreeMemory>& free = free_memory());

}  // namespace mantissa
