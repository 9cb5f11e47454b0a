// Cosines and sines of rotary positions. Pair i of the D channels of a head turns by the angle position * frequency[i].
#pragma once

#include <vector>

#include "mantissa/backend/backend.h"
#include "mantissa/models/model_config.h"

namespace mantissa {

struct RopeFrequencies {
  std::vector<float> of_pairs;  // [D / 2]
  float scale = 1.0F;           // scale of cos and sin
};

// theta^(-2i / D), scaled as _compute_llama3_parameters() or _compute_yarn_parameters() of Hugging Face transformers 5
// (modeling_rope_utils.py) do, in fp32: Llama 3.1; YaRN, Peng et al. 2023. To the bit but for powers that torch rounds otherwise than to
// the nearest, one in a hundred.
RopeFrequencies rope_frequencies(int64_t head_dim, double theta, const std::optional<RopeScalingConfig>& scaling);

// [positions, D] fp32: scale * cos | scale * sin, of angles in fp32. Built here so that every device reads the same bits.
Tensor make_rope_table(Backend& device, int64_t positions, const RopeFrequencies& frequencies);

}  // namespace mantissa
