// The only way from a file to the configuration of a run.
#pragma once

#include <cstdint>

#include "mantissa/config/run_config.h"

namespace mantissa {

enum class Inputs { must_exist, unchecked };

// Reads, checks and completes a configuration: batch sizes, heads, recipes, run name and placeholders are derived, input paths made
// absolute, and every input path must exist unless told otherwise; checkpoint.init_from is not needed by a run that continues from its own
// checkpoints. model.vocab_size stays null where only the data can tell. No side effects. Throws one Error(usage) that lists everything
// that is wrong.
// world: how many ranks were started; 0: as many as `parallel` asks for.
LoadedConfig load_run_config(const ConfigSources& sources, Inputs inputs = Inputs::must_exist, int64_t world = 0);

}  // namespace mantissa
