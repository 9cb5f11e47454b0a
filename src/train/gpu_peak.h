// Knows how fast GPUs multiply according to their data sheets, the peak that mfu refers to.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/backend/gpus.h"
#include "mantissa/comm/communicator.h"

namespace mantissa {

// Returns the dense bf16 FLOP/s, accumulated in fp32, of a GPU by the name that its driver has for it; none if it is not in the table.
std::optional<double> data_sheet_peak(std::string_view gpu);

// Returns that of the GPUs of all ranks together, of which one that several ranks use counts once; none if any is not in the table.
std::optional<double> data_sheet_peak(const std::vector<Gpu>& of_ranks);

// Like the second, for the ranks of a run, all of which call it together; none for a device other than "cuda".
std::optional<double> data_sheet_peak(const Backend& device, const Communicator& world);

}  // namespace mantissa
