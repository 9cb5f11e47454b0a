// Measures what the ranks of a run could compute at best, the peak that mfu_meas refers to.
#pragma once

#include <optional>

#include "mantissa/backend/backend.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Returns the FLOP/s of all ranks together, which run a GemmCeiling at the same time, as they will compute. None for
// backends but "cpu" and "cuda", for a run too short to be worth the time, and where a GPU has no memory for it, which the log says.
// All ranks call it together; model.vocab_size must be set.
std::optional<double> measured_gemm_rate(const RunConfig& config, const Backend& device, const Communicator& world);

}  // namespace mantissa
