// Says how a run trains its model.
#pragma once

#include "comm/mesh.h"
#include "mantissa/config/run_config.h"
#include "models/gpt.h"

namespace mantissa {

// Returns the options with which the ranks of a mesh train the model of a config.
inline GptOptions training_options(const RunConfig& config, const Mesh& mesh) {
  return {.recompute = config.training.recompute,
          .mesh = mesh,
          .micro_batches = *config.training.grad_accum * mesh.data.size(),
          .quantized_dispatch = config.precision.quantized_dispatch,
          .expert_gradients = config.training.expert_gradients()};
}

}  // namespace mantissa
