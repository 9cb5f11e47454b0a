// Writes the folder of an export from weights wherever they are: a checkpoint, or the ranks of a run.
#pragma once

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hf/export_weights.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/data/tokenizer.h"
#include "mantissa/hf/export.h"
#include "mantissa/io/safetensors.h"

namespace mantissa {

// What lies beside the weights.
struct ExportHead {
  const ModelConfig& model;
  const ExportOptions& options;
  const std::vector<TokenizerFile>& files;
  const std::optional<Tokenizer>& tokenizer;
  int64_t step;
  std::string manifest;  // hash of that of the checkpoint
};

// Writes `output` as export_model() does. read_back is called on all ranks before the folder gets its name, with its path on the rank that
// writes; it throws if the folder differs from what was to be written. The returned sizes are known on all.
ExportedModel write_export(const ExportedWeights& exported, ForwardReader& weights, const ExportHead& head,
                           const std::filesystem::path& output, const std::function<void(const std::filesystem::path&)>& read_back);

// A tensor as the mantissa.json of a folder describes it.
struct ProvenTensor {
  std::string name, type, xxh64;  // type: "BF16 [259, 64]"
};

// Verifies the tensors of a folder. mantissa.json must name each of them once, and the files beside them. Throws what verify_export() does.
class ExportProof {
 public:
  explicit ExportProof(const std::filesystem::path& folder);
  size_t tensors() const { return tensors_.size(); }
  void verify(size_t tensor);  // its type, shape and bytes

 private:
  std::filesystem::path folder_;
  std::vector<ProvenTensor> tensors_;
  SafetensorsFolder files_;
};

}  // namespace mantissa
