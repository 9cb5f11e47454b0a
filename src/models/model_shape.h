// Lists the modules of a model without building it; the precision plan is resolved from them.
#pragma once

#include <string>
#include <vector>

#include "mantissa/models/model_config.h"
#include "mantissa/precision/plan.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

// Returns them in the order in which Gpt makes them. While config.vocab_size is null, embedding and output have out 0. tensor is the number
// of ranks that share each weight; the shapes are those of the whole.
ModelShape model_shape(const ModelConfig& config, int64_t tensor = 1);

// Returns the parameters of these modules as checkpoints store them: ModuleShape::weight_name(), without padding, and, where there is one,
// ModuleShape::bias_name().
struct ParameterShape {
  std::string name;
  Shape shape;
  Shape padded;  // with the rows of padding, which checkpoints held once
};
std::vector<ParameterShape> parameter_shapes(const ModelShape& model);
// Returns their buffers: ModuleShape::buffer_name.
std::vector<ParameterShape> buffer_shapes(const ModelShape& model);

// Returns the FLOPs of attention, forward and backward, for one token of a layer whose output projection this is; 0 for other modules. They
// are 12 heads D for each key that a query sees: T / 2 of them on average, or W - W^2 / 2T with a window W below T.
double attention_flops_per_token(const ModuleShape& module, int64_t seq_len);

// Returns the training FLOPs per token at a sequence length: 6 N_mm + those of attention, where N_mm counts every weight a token is
// multiplied with (block linears and output projection, also when tied).
double training_flops_per_token(const ModelShape& model, int64_t seq_len);

}  // namespace mantissa
