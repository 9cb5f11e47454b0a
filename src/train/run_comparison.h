// Answers what `mantissa compare` asks of a configuration without training it: hashes of all that a run reads, gradients of its first step,
// and how well those of another recipe agree with them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "mantissa/config/run_config.h"

namespace mantissa {

// Hashes by path of a file of the data, or by key of the configuration. Runs of one configuration are the same only if these are equal,
// too.
using RunInputs = std::map<std::string, std::string>;

// Returns size and hash of each file of the data, and hashes of the tokenizer and of the models of checkpoint.init_from and
// training.teacher. Of large files and of folders the hash is that of samples: fingerprint() in data/token_writer.h and
// HfWeights::fingerprint(). Throws what train() throws for these inputs before its first step.
RunInputs run_inputs(const LoadedConfig& loaded);

// Gradients by name of the parameter.
using Gradients = std::map<std::string, std::vector<float>>;

// Returns the gradients of the weights that GEMMs multiply and that are not frozen, before they are clipped, of the first step of this run
// as one process: at its initial weights, on its first global batch. Nothing is written. Throws what train() throws before its first step,
// and Error(numerical) for a gradient that is not finite.
Gradients first_gradients(const LoadedConfig& loaded);

// Returns the cosine between the gradients of each parameter that both have; none for a parameter whose gradient is 0 in one of them.
std::map<std::string, double> gradient_cosines(const Gradients& gradients, const Gradients& baseline);

}  // namespace mantissa
