// Compares what the saves of a run need of the disk with what is free there, before the first step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/config/run_config.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// Returns the size of a checkpoint as Manifest::bytes() has it.
int64_t checkpoint_bytes(const ModelConfig& model, const std::vector<TokenizerFile>& files);

// Returns how many checkpoints lie side by side at most beyond those that are there. step: that at which the run goes on; kept: the
// checkpoints there, which later ones replace.
int64_t most_new_checkpoints(const RunConfig& config, int64_t step, int64_t kept);

// Says with both numbers that the disk of checkpoint.dir cannot take the last state of the run; "": it can. Warns if it cannot take all
// checkpoints that the run keeps side by side. resumed: the step at which it goes on in its own folder.
std::string find_room_for_saves(const RunConfig& config, const PrecisionPlan& plan, const std::vector<TokenizerFile>& files,
                                std::optional<int64_t> resumed);

}  // namespace mantissa
