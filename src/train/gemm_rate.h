// Measures what the ranks of a run could compute at best, the peak that mfu_meas refers to.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "backend/gpus.h"
#include "mantissa/backend/backend.h"
#include "mantissa/comm/communicator.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// Returns the FLOP/s of all ranks together, which run a GemmCeiling at the same time, as they will compute. None for
// backends but "cpu" and "cuda", for a run too short to be worth the time, and where a GPU has no memory for it, which the log says.
// All ranks call it together; model.vocab_size must be set.
std::optional<double> measured_gemm_rate(const RunConfig& config, const Backend& device, const Communicator& world);

// Knows how fast GPUs multiply according to their data sheets, the peak that mfu refers to.

// Returns the dense bf16 FLOP/s, accumulated in fp32, of a GPU by the name that its driver has for it; none if it is not in the table.
std::optional<double> data_sheet_peak(std::string_view gpu);

// Returns that of the GPUs of all ranks together, of which one that several ranks use counts once; none if any is not in the table.
std::optional<double> data_sheet_peak(const std::vector<Gpu>& of_ranks);

// Like the second, for the ranks of a run, all of which call it together; none for a device other than "cuda".
std::optional<double> data_sheet_peak(const Backend& device, const Communicator& world);

}  // namespace mantissa
