// What a run promises about equal bits, and asks of the CPU that it starts on.
#pragma once

#include "mantissa/backend/backend.h"
#include "mantissa/train/config.h"

namespace mantissa {

// Does nothing for a run of one rank without experts and padding. Else throws Error(environment) with the way out if bits of products
// depend on the place of a row (Backend::unequal_places()), and says in the log that they do not.
void require_equal_places(const RunConfig& config, const Backend& device);

}  // namespace mantissa
