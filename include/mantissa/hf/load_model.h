// The model of a checkpoint, or of a folder of Hugging Face's form.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "mantissa/config/run_config.h"
#include "mantissa/data/tokenizer.h"
#include "mantissa/models/gpt.h"

namespace mantissa {

// A model for evaluation and generation, on the device and with the precision it was trained with.
struct LoadedModel {
  std::filesystem::path path;
  int64_t step = 0;
  RunConfig config;
  std::optional<Tokenizer> tokenizer;
  // Of an imported model: those of generation_config.json, else of config.json. Throws Error(data) where these are damaged.
  std::function<std::vector<int32_t>()> end_tokens;
  std::unique_ptr<Backend> device;
  std::unique_ptr<Gpt> model;
};

// Of the checkpoint that a path stands for (load_checkpoint). The saved config is compared with the tensors before anything of its size is
// made: Error(data) where they do not fit; Error(usage) where the model cannot be divided among the ranks, which call this together.
// dtype: stands for precision.dtype; the codes are those of the checkpoint either way.
LoadedModel load_model(const std::filesystem::path& path, const TensorRanks& ranks = {}, std::optional<Dtype> dtype = {});

}  // namespace mantissa
