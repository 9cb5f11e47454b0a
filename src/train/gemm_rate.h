// What the ranks of a run could compute at best: the peak that mfu_meas refers to.
#pragma once

#include <optional>

#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// FLOP/s of all ranks together, which measure a GemmCeiling at the same time, as they will compute. None with other devices than "cpu", and
// for a run that is over too soon for that to be worth its time. A call of all ranks; model.vocab_size must be set.
std::optional<double> measured_gemm_rate(const RunConfig& config, const Communicator& world);

}  // namespace mantissa
