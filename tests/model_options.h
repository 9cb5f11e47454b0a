// Options of small models of several architectures, as --set takes them.
#pragma once

#include <string>

#include "training.h"

namespace mantissa::test {

inline const std::string kExperts = R"("num_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 96)",
                         kFourBitExperts = R"(precision.rules=[{"match": "layers.*.moe.experts.*", "recipe": "mxfp4_qat"}])",
                         kFourBitTable = R"(precision.rules=[{"match": "embed", "recipe": "mxfp4_qat"}])",
                         kEightBits = R"(precision.recipes={"rows": {"weight_fake_quant": {"format": "e4m3"}}})",
                         kEightBitTable = R"(precision.rules=[{"match": "embed", "recipe": "rows"}])";

inline const Sets kGptOss = {"model.qk_norm=false",
                             "model.attention_bias=all",
                             "model.attention_sinks=true",
                             "model.activation=swiglu_clamped",
                             "model.sliding_window=8",
                             "model.sliding_layers=[0]",
                             "model.tie_word_embeddings=false",
                             "model.moe={" + kExperts + R"(, "router_bias": true, "expert_mlp_bias": true})"},
                  kGpt2 = {"model.norm=layer",
                           "model.norm_bias=true",
                           "model.position=learned",
                           "model.activation=gelu_tanh",
                           "model.attention_bias=all",
                           "model.mlp_bias=true",
                           "model.qk_norm=false",
                           "model.num_attention_heads=2",
                           "model.num_key_value_heads=2",
                           "model.intermediate_size=256",
                           "model.tie_word_embeddings=true"};

}  // namespace mantissa::test
