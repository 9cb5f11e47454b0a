// A model of Hugging Face's form as a checkpoint: "value.NAME", each parameter in the type of its file, without masters and moments; and
// "file.NAME", the bytes of the files that belong to the model but are no weights.
#pragma once

#include <cstdint>
#include <filesystem>

#include "mantissa/checkpoint/weight_source.h"
#include "mantissa/hf/hf_weights.h"

namespace mantissa {

struct ImportedModel {
  Architecture architecture = Architecture::qwen3;
  int64_t parameters = 0, bytes = 0;
};

// Writes the checkpoint `output`, a folder that is not there yet, and has it read again before it gets its name. Memory is a chunk of some
// megabytes, or one matrix where the architecture keeps it transposed. Throws what HfWeights does, Error(data) that names the first value
// that is NaN or Inf, and Error(storage).
ImportedModel import_model(const std::filesystem::path& folder, const std::filesystem::path& output);

}  // namespace mantissa
