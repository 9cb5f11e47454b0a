// Says how a run trains its model.
#pragma once

#include "comm/mesh.h"
#include "mantissa/config/run_config.h"
#include "models/gpt.h"

namespace mantissa {

// Returns the options with which the ranks of a mesh train the model of a config.
GptOptions training_options(const RunConfig& config, const Mesh& mesh);

}  // namespace mantissa
