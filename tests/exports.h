// Runs, and folders of Hugging Face's form made of them.
#pragma once

#include <gmock/gmock.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/saved_model.h"
#include "hf/export.h"
#include "hf/hf_weights.h"
#include "hf/load_model.h"
#include "hf_folders.h"
#include "mantissa/backend/functions.h"
#include "training.h"

namespace mantissa::test {

// Heads that are no power of two, and of another size than hidden_size gives them.
inline const std::vector<std::string> kShape = {
    "model.hidden_size=64", "model.intermediate_size=96", "model.num_attention_heads=3",     "model.num_key_value_heads=1",
    "model.head_dim=32",    "training.steps=3",           "model.max_position_embeddings=16"};

// Reads a folder of Hugging Face's form as a run that starts from it does.
inline void require_usable(const std::string& folder) {
  HfWeights weights(folder);
  tokenizer_files(weights);
  load_model(folder, make_backend("cpu"));
}

class ExportTest : public TrainingTest {
 protected:
  std::string path(const std::string& name) const { return folder_ / name; }
  // The checkpoint of a run of one step of kShape in bf16, with these changes.
  std::string trained(const std::string& name, const std::vector<std::string>& more) const {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(), {"precision.dtype=bf16", "training.steps=1"});
    sets.insert(sets.end(), more.begin(), more.end());
    run(name, sets);
    return checkpoint(name, 1);
  }
  // The error of a run that starts from a folder.
  Error folder_error(const std::string& from) const {
    return error_of([&] { require_usable(path(from)); });
  }
  void export_to(const std::string& from, const std::string& name, const ExportOptions& options = {}) const {
    export_model(from, path(name), options, make_backend("cpu"));
  }
  void pack_to(const std::string& checkpoint, const std::string& name, Convention convention = Convention::compressed_tensors) const {
    export_to(checkpoint, name, {.weights = ExportWeights::packed, .convention = convention});
  }
  std::map<std::string, std::string> all_bytes(const std::string& folder) const {
    const HfFolder read(path(folder));
    std::map<std::string, std::string> out;
    for (const std::string& name : read.names()) out[name] = read.bytes(name);
    return out;
  }
  // The plan of kShape by a recipe, with a vocabulary, which otherwise follows from the data.
  PrecisionPlan plan_of(const std::string& recipe, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> sets = kShape;
    sets.insert(sets.end(), {"precision.dtype=bf16", "precision.recipe=" + recipe});
    sets.insert(sets.end(), more.begin(), more.end());
    RunConfig out = config(recipe, std::move(sets)).config;
    out.model.vocab_size = 8;
    return resolve_plan(out);
  }
  nlohmann::json json_in(const std::string& file) const { return nlohmann::json::parse(read_file(path(file))); }

  int runs_ = 0;

  std::optional<std::string> difference(const std::string& folder, const std::string& checkpoint) const {  // or another folder
    ModelExport model(checkpoint, {}, make_backend("cpu"));
    HfWeights written(path(folder));
    return export_difference(written, model.weights());
  }
};

class Exports : public ExportTest {};

// Logits of a model loaded for use, on one sequence.
inline std::vector<float> logits_of(const std::string& path, const ModelUse& use = {}) {
  const LoadedModel loaded = load_model(path, make_backend("cpu"), {}, use);
  std::vector<int32_t> tokens(16), positions(16);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<int32_t>((i * 5 + i / 3) % 8);
    positions[i] = static_cast<int32_t>(i);
  }
  const Shape shape{16};
  Backend& device = *loaded.device;
  return to_host<float>(converted(loaded.model->logits({.batch = 1,
                                                        .tokens = from_host(device, Dtype::i32, shape, tokens.data()),
                                                        .positions = from_host(device, Dtype::i32, shape, positions.data()),
                                                        .segment_starts = {}}),
                                  Dtype::f32));
}

}  // namespace mantissa::test
