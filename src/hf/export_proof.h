// The file mantissa.json of an export: what every tensor was made from, and hashes of all tensors and files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "mantissa/base/hash.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/config/export_options.h"
#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

struct ProvenTensor {
  std::string name, module, dtype;
  std::vector<int64_t> shape;
  Quantization how = {};  // that of the weight that it is a part of
  Hash64 hash = {};
};

struct ProvenCheckpoint {
  int64_t step = 0;
  std::string manifest;  // its hash

  void fields(auto& v) {
    v("step", step);
    v("manifest", manifest);
  }
};

// Writes it into a folder that holds these files. Without a checkpoint the model came from a folder of Hugging Face's form.
// has_convention: the folder has codes in the form of options.convention.
void write_export_proof(const std::filesystem::path& folder, const std::optional<ProvenCheckpoint>& checkpoint,
                        const ExportOptions& options, bool has_convention, const std::vector<TokenizerFile>& files,
                        const std::vector<ProvenTensor>& tensors);

}  // namespace mantissa
