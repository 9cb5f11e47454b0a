// Hashes of all that a run reads, of large files and folders from samples: runs of one configuration are the same only if these are equal,
// too.
#pragma once

#include <map>
#include <string>

#include "mantissa/config/run_config.h"

namespace mantissa {

// By path of a file of the data, or by key of the configuration.
using RunInputs = std::map<std::string, std::string>;

// Returns size and hash of each file of the data, and hashes of the tokenizer and of the models of checkpoint.init_from and
// training.teacher. Of large files and of folders the hash is that of samples: fingerprint() in data/token_writer.h and
// HfWeights::fingerprint(). Throws what train() throws for these inputs before its first step.
RunInputs run_inputs(const LoadedConfig& loaded);

}  // namespace mantissa
