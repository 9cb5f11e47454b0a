// The modules of a model, without building it: what the precision plan is resolved from.
#pragma once

#include "mantissa/models/model_config.h"
#include "mantissa/precision/plan.h"

namespace mantissa {

// In the order in which Gpt makes them. While config.vocab_size is null, embedding and output have out 0.
ModelShape model_shape(const ModelConfig& config);

}  // namespace mantissa
