#include "config/training_options.h"

namespace mantissa {

GptOptions training_options(const RunConfig& config, const Mesh& mesh) {
  return {.recompute = config.training.recompute,
          .mesh = mesh,
          .micro_batches = *config.training.grad_accum * mesh.data.size(),
          .quantized_dispatch = config.precision.quantized_dispatch,
          .expert_gradients = config.training.expert_gradients()};
}

}  // namespace mantissa
