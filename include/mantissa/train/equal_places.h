// Checks that the CPU keeps what a run promises about equal bits.
#pragma once

#include <string>

#include "mantissa/backend/backend.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Throws Error(environment) that names a workaround if bits of GEMMs depend on the position of a row or column or on zeros behind the depth
// (Backend::unequal_places()). `consequence` begins with what is at stake: "results would depend on the number of ranks".
void require_equal_places(const Backend& device, const std::string& consequence);

// Makes this check for a run with experts, several ranks or padding of the vocabulary, and logs that it holds; does nothing for other runs.
void require_equal_places(const RunConfig& config, const Backend& device);

}  // namespace mantissa
