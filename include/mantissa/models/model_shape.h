// The modules of a model, without building it: what the precision plan is resolved from.
#pragma once

#include <string>
#include <vector>

#include "mantissa/models/model_config.h"
#include "mantissa/precision/plan.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

// In the order in which Gpt makes them. While config.vocab_size is null, embedding and output have out 0.
ModelShape model_shape(const ModelConfig& config);

// The parameters of these modules, as Gpt calls them: "<path>.weight" and, where there is one, "<path>.bias".
struct ParameterShape {
  std::string name;
  Shape shape;
};
std::vector<ParameterShape> parameter_shapes(const ModelShape& model);

}  // namespace mantissa
