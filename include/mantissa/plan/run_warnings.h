// Warns of what a run does not do although its configuration may look so.
#pragma once

#include <string>
#include <vector>

#include "mantissa/config/run_config.h"

namespace mantissa {

// Returns the warnings of the plan and those of options that belong together; one sentence each, which begins with the key where there is
// one.
std::vector<std::string> run_warnings(const RunConfig& config, const PrecisionPlan& plan);

}  // namespace mantissa
