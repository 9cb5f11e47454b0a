// Saves a run: its checkpoint and, under checkpoint.export, beside those that it keeps, the same weights as a folder of Hugging Face's
// form, <logging.dir>/exports/step-00000010, from the memory of its ranks.
#pragma once

#include <filesystem>
#include <optional>

#include "mantissa/base/progressed.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/checkpoint_directory.h"
#include "mantissa/metrics/events.h"

namespace mantissa {

// Reports, under checkpoint.export, a model that no architecture has, and what no convention or type can hold.
void check_export(const RunConfig& config, ConfigReport& report);

std::filesystem::path export_folder(const RunConfig& config, int64_t step);

// kept is false before a stop, which may have seconds left; then no export is made.
enum class SaveFor { keeping, stopping };

// Saves; all ranks call it together, and the first has the directory. If the disk does not take checkpoint or export, the event says so and
// nothing is thrown. Deletes exports whose checkpoint is gone.
SaveEvent save_run(const TrainedParts& parts, const TrainState& state, std::optional<CheckpointDirectory>& directory, SaveFor purpose,
                   const Progressed& progressed);

}  // namespace mantissa
