// The modules of a model, without building it: what the precision plan is resolved from.
#pragma once

#include <string>
#include <vector>

#include "mantissa/models/model_config.h"
#include "mantissa/precision/plan.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

// In the order in which Gpt makes them. While config.vocab_size is null, embedding and output have out 0. tensor: the ranks that are to
// share each weight; the shapes are those of the whole.
ModelShape model_shape(const ModelConfig& config, int64_t tensor = 1);

// The parameters of these modules, as checkpoints store them: ModuleShape::weight_name(), without padding, and, where there is one,
// "<path>.bias".
struct ParameterShape {
  std::string name;
  Shape shape;
  Shape padded;  // with the rows of padding, which checkpoints held once
};
std::vector<ParameterShape> parameter_shapes(const ModelShape& model);
// Their buffers: "<path of the layer's experts>.expert_bias".
std::vector<ParameterShape> buffer_shapes(const ModelShape& model);

// Of attention, forward and backward, for one token of a layer whose output projection this is; 0 for other modules. 12 heads D for each
// key that a query sees: T / 2 of them on average, with a window W below T they are W - W^2 / 2T.
double attention_flops_per_token(const ModuleShape& module, int64_t seq_len);

// Training FLOPs per token at a sequence length: 6 N_mm + those of attention, N_mm counting every weight a token is multiplied with (block
// linears and output projection, also when tied).
double training_flops_per_token(const ModelShape& model, int64_t seq_len);

}  // namespace mantissa
