// Loads the model of a checkpoint, or of a folder of Hugging Face's form.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "data/tokenizer.h"
#include "hf/hf_weights.h"
#include "mantissa/config/run_config.h"
#include "models/gpt.h"
#include "optim/optimizer.h"

namespace mantissa {

// A model for evaluation and generation, with the precision it was trained with.
struct LoadedModel {
  std::filesystem::path path;
  int64_t step = 0;
  RunConfig config;
  std::optional<Tokenizer> tokenizer;
  // The files beside it that say how it is prompted: config.json, generation_config.json, tokenizer_config.json, chat templates.
  std::vector<TokenizerFile> files = {};
  // Ids at which a text ends: those of generation_config.json, else of config.json, and those that training here taught.
  // Throws Error(data) where the files are damaged.
  std::function<std::vector<int32_t>()> end_tokens;
  std::unique_ptr<Backend> device;
  std::unique_ptr<Gpt> model;
};

// How a model is used otherwise than it was trained.
struct ModelUse {
  std::optional<Dtype> dtype = {};          // stands for precision.dtype; what is quantized is not changed by it
  std::vector<std::string> precision = {};  // values of its section "precision" (with_precision()), by which its weights are quantized anew
};

// Returns a configuration by which a model is used. Codes of a folder do not say how they were trained: with other values they are read
// as numbers, and what they say of recipes is left out. Throws what with_precision() throws.
RunConfig as_used(RunConfig config, bool of_folder, const ModelUse& use);

// Loads the model of the checkpoint that a path stands for (load_checkpoint), or of a folder. The saved config is compared with the tensors
// before anything of its size is made: Error(data) where they do not fit; Error(usage) where the model cannot be divided among the ranks,
// which call this together. The model goes onto the device, whatever training.device the run had.
LoadedModel load_model(const std::filesystem::path& path, std::unique_ptr<Backend> device, const Mesh& mesh = {}, const ModelUse& use = {});

// Returns a warning if the model was trained with another chat template, or its folder has one that renders conversations differently
// (chat_template_difference()); "" if neither.
std::string chat_template_warning(const LoadedModel& loaded, ChatTemplate which, const std::optional<std::string>& date);

// Returns the config of the checkpoint that a path stands for, or what a folder of Hugging Face's form says of its model.
RunConfig config_of_model(const std::filesystem::path& path);

// Returns whether rank 0 finds a folder of Hugging Face's form or a GGUF file there, and not a checkpoint. A call of all ranks.
bool starts_from_folder(const Communicator& ranks, const std::filesystem::path& path);

// Throws Error(usage) for a parameter of the model that a folder lacks or has in another shape: checkpoint.allow_model_change may list keys
// that change shapes.
void require_weights_fit(const HfWeights& weights, const ModelConfig& model);

// Reads the weights of a folder that fits into the optimizer's shards, or, without one, into all parameters; the caller gathers. Throws
// Error(data) for a weight that is NaN or Inf, named as in the folder, and for files that change while they are read.
void load_hf_weights(HfWeights& weights, ParameterSet& parameters, const Optimizer* optimizer = nullptr);

}  // namespace mantissa
