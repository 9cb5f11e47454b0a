// The only way from a file to the configuration of a run.
#pragma once

#include <cstdint>

#include "mantissa/config/run_config.h"

namespace mantissa {

enum class Inputs { must_exist, unchecked };

// as_configured: as checkpoint.resume says. resumed: the run goes on from its checkpoints, and it is an error if there are none. restarted:
// it goes on if there are any, as its launcher starts it once more.
enum class Start { as_configured, resumed, restarted };

// Reads, checks and completes a configuration: batch sizes, heads, recipes, run name and placeholders are derived, input paths made
// absolute, and every input path must exist unless told otherwise. model.vocab_size stays null where only the data can tell. No side
// effects. Throws one Error(usage) that lists everything that is wrong, Error(data) for a damaged checkpoint or folder that it reads.
//
// A run that goes on from a checkpoint takes its model and its tokenizer from there, unless they are given, and so does one that starts
// from a checkpoint or folder by checkpoint.init_from; where both are true, init_from is not looked at.
//
// The config.json that a run wrote stands for the folder in which it lies, whatever that is called now: logging.dir, logging.run_name and
// what lay inside follow it unless other sources give them.
// world: how many ranks were started; 0: as many as `parallel` asks for.
LoadedConfig load_run_config(const ConfigSources& sources, Inputs inputs = Inputs::must_exist, int64_t world = 0,
                             Start start = Start::as_configured);

}  // namespace mantissa
