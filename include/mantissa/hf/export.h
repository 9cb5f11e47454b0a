// A checkpoint as a folder of Hugging Face's form whose weights are what forward multiplies by, and the proof that they are.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "mantissa/checkpoint/checkpoint_reader.h"
#include "mantissa/config/export_options.h"
#include "mantissa/data/tokenizer.h"
#include "mantissa/hf/forward_weights.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/hf/hugging_face.h"

namespace mantissa {

struct ExportedModel {
  Architecture architecture = Architecture::qwen3;
  int64_t tensors = 0, bytes = 0;
};

// Writes `output`, a folder that is not there yet: config.json, the weights, tokenizer and generation files as they were imported, and
// mantissa.json, which says of every tensor what it was made from and its hash. Before it gets its name the weights are read back and
// compared. Memory is a chunk of some megabytes, or one matrix where the architecture keeps it transposed; no model is built.
// Throws Error(usage) for a model that no architecture expresses, for values that the type cannot hold and for codes that the convention
// cannot, with the name of the module, Error(data) for a damaged checkpoint and for values that are NaN or Inf, Error(storage).
ExportedModel export_model(CheckpointReader& reader, const std::filesystem::path& output, const ExportOptions& options);

// What of a model only some programs read, or none does as training did. tokenizer: one that an export writes itself.
std::vector<std::string> export_warnings(const ModelConfig& model, const std::optional<Tokenizer>& tokenizer);

// In what a folder's model computes otherwise than a checkpoint's: "model.rope_theta: 10000 in the checkpoint, 500 here"; nothing if it is
// the same.
std::vector<std::string> export_model_differences(const HfWeights& folder, const ModelConfig& model);

// Codes of a folder whose inputs a server quantizes and a checkpoint's forward does not, or the other way round: "layers.0.mlp.down: inputs
// are quantized in the checkpoint, in high precision here". Blocks of inputs are not compared: those of every convention are of 32.
std::vector<std::string> export_scheme_differences(const HfWeights& folder, const ForwardTypes& types);

// Of one model: the first value of a folder that differs from what forward multiplies by: "model.embed_tokens.weight[3, 5] is 0.5, and the
// ... 0.25". Zeros are equal whatever their sign where forward decodes -0 as 0.
std::optional<std::string> export_difference(HfWeights& folder, ForwardReader& weights);

// Compares names, types, shapes and the hashes of the bytes of all tensors, and the hashes of the files beside them, with the folder's
// mantissa.json: how many tensors there are. Throws Error(data) that names the first that differs, is missing or, a tensor, is one more,
// Error(usage) if the folder has no such file.
int64_t verify_export(const std::filesystem::path& folder);

}  // namespace mantissa
