// What a run promises about equal bits, and asks of the CPU that it starts on.
#pragma once

#include <string>

#include "mantissa/backend/backend.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Throws Error(environment) with the way out, saying what follows, if bits of products depend on the place of a row or column or
// on zeros behind the depth (Backend::unequal_places()). `consequence` begins with what: "results would depend on the number of ranks".
void require_equal_places(const Backend& device, const std::string& consequence);

// The same for a run with experts, several ranks or padding of the vocabulary, whose log tells that it holds; nothing for another run.
void require_equal_places(const RunConfig& config, const Backend& device);

}  // namespace mantissa
