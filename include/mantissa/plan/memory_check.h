// Refuses a run that its hosts have no memory for, before any of it is allocated.
#pragma once

#include <vector>

#include "mantissa/base/free_memory.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Throws Error(environment) on all ranks if estimate_memory() of the ranks of a host, or of a control group with a limit, exceeds what is
// free there, unless training.allow_memory_overcommit. All ranks call it together.
void require_free_memory(const RunConfig& config, const PrecisionPlan& plan, const Communicator& world,
                         const std::vector<FreeMemory>& free = free_memory());

}  // namespace mantissa
