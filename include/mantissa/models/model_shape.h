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

// The parameters of these modules, as checkpoints store them: "<path>.weight", without padding, and, where there is one, "<path>.bias".
struct ParameterShape {
  std::string name;
  Shape shape;
  Shape padded;  // with the rows of padding, which checkpoints held once
};
std::vector<ParameterShape> parameter_shapes(const ModelShape& model);
// Their buffers: "<path of the layer's experts>.expert_bias".
std::vector<ParameterShape> buffer_shapes(const ModelShape& model);

// Training FLOPs per token at a sequence length: 6 N_mm + 6 L heads D T, N_mm counting every weight a token is multiplied with (block
// linears and output projection, also when tied).
double training_flops_per_token(const ModelShape& model, int64_t seq_len);

}  // namespace mantissa
