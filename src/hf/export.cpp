#include "mantissa/hf/export.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>

#include "mantissa/base/log.h"
#include "mantissa/checkpoint/checkpoint.h"
#include "mantissa/checkpoint/config_differences.h"
#include "mantissa/checkpoint/saved_model.h"
#include "mantissa/hf/export_files.h"
#include "mantissa/hf/hf_weights.h"
#include "mantissa/hf/write_export.h"

namespace mantissa {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// The names of imported tensors that were bf16 although the parameter they are a part of is kept in fp32.
std::set<std::string> narrow_tensors(const CheckpointReader& reader) {
  const json state = json::parse(reader.manifest().state);
  std::set<std::string> names;
  const json* const imported = state.is_object() && state.contains("imported") ? &state["imported"] : nullptr;
  if (!imported || !imported->is_object() || !imported->contains("bf16_tensors")) return names;
  const json& list = (*imported)["bf16_tensors"];
  const bool good = list.is_array() && std::ranges::all_of(list, [](const json& name) { return name.is_string(); });
  require(good, ExitCode::data, reader.directory().string(), ": state.imported.bf16_tensors must be a list of names");
  for (const json& name : list) names.insert(name.get<std::string>());
  return names;
}

bool same_value(float a, float b, bool zeros_alike) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (zeros_alike && a == 0.0F && b == 0.0F);
}

std::optional<std::string> tensor_difference(const ArchitectureTensor& tensor, HfWeights& folder, ForwardReader& weights) {
  const bool zeros_alike = weights.quantized(tensor.parameter).rule == ScaleRule::flashinfer;
  std::optional<std::string> found;
  std::vector<float> there, here;
  for_chunks(tensor, [&](const RowRun& run, int64_t begin, int64_t end) {
    if (found) return;
    const int64_t columns = tensor.columns();
    there.resize(static_cast<size_t>((end - begin) * columns));
    here.resize(there.size());
    Box box{.start = {begin}, .size = {end - begin}};
    if (tensor.shape.size() > 1) box = {.start = {begin, 0}, .size = {end - begin, columns}};
    folder.read_fp32(tensor.parameter, box, there);
    weights.read(tensor.parameter, begin, end, here);
    for (size_t i = 0; i < here.size() && !found; ++i) {
      if (same_value(there[i], here[i], zeros_alike)) continue;
      const auto index = static_cast<int64_t>(i);
      found = text(element_name(tensor, run.file_row + (begin - run.row + index / columns) * run.step, index % columns), " is ", there[i],
                   ", forward multiplies by ", here[i]);
    }
  });
  return found;
}

}  // namespace

ExportedModel export_model(CheckpointReader& reader, const fs::path& output, const ExportOptions& options) {
  const SavedModel saved = saved_model(reader);
  CheckpointWeights source(reader);
  ForwardWeights weights(source, saved.plan);
  const ExportedWeights exported(weights, saved.config.model, options, narrow_tensors(reader));
  const std::vector<TokenizerFile> files = tokenizer_files(reader);
  const std::optional<Tokenizer> tokenizer = saved_tokenizer(reader);
  for (const std::string& warning : export_warnings(saved.config.model, own_tokenizer(files, tokenizer))) log_warning(warning);
  const ExportHead head{.model = saved.config.model,
                        .options = options,
                        .files = files,
                        .tokenizer = tokenizer,
                        .step = reader.manifest().step,
                        .manifest = reader.hash()};
  return write_export(exported, weights, head, output, [&](const fs::path& folder) {
    HfWeights written(folder);
    std::optional<std::string> difference = export_difference(written, weights);
    const std::vector<std::string> schemes = export_scheme_differences(written, weights);
    if (!difference && !schemes.empty()) difference = schemes.front();
    require(!difference, ExitCode::storage, output.string(), ": what was written is not what was to be: ", difference.value_or(""));
  });
}

std::vector<std::string> export_warnings(const ModelConfig& model, const std::optional<Tokenizer>& tokenizer) {
  std::vector<std::string> warnings;
  if (model.moe && model.moe->capacity_factor)
    warnings.emplace_back("model.moe.capacity_factor: training dropped assignments, a server drops none, as eval does");
  if (model.moe && !model.moe->dense_layers.empty())
    warnings.emplace_back(
        "model.moe.dense_layers: layers without experts among others are read by transformers and vLLM only, not by llama.cpp");
  if (tokenizer)
    warnings.emplace_back(
        "tokenizer.json: llama.cpp knows tokenizers by their pieces of a certain text, and refuses this one, which has no merges");
  return warnings;
}

std::vector<std::string> export_model_differences(const HfWeights& folder, const ModelConfig& model) {
  return forward_differences(model, folder.config().model);
}

std::vector<std::string> export_scheme_differences(const HfWeights& folder, const ForwardTypes& types) {
  std::vector<std::string> differences;
  for (const auto& [module, here] : folder.packed_modules()) {
    const bool there = types.quantizes_inputs(module + ".weight");
    const auto how = [](bool quantized) { return quantized ? "quantized" : "in high precision"; };
    if (there != here.inputs)
      differences.push_back(text(module, ": inputs are ", how(there), " in the checkpoint, ", how(here.inputs), " here"));
  }
  return differences;
}

std::optional<std::string> export_difference(HfWeights& folder, ForwardReader& weights) {
  for (const ArchitectureTensor& tensor : folder.tensors()) {
    if (std::optional<std::string> difference = tensor_difference(tensor, folder, weights)) return difference;
  }
  return {};
}

int64_t verify_export(const fs::path& folder) {
  ExportProof proof(folder);
  for (size_t i = 0; i < proof.tensors(); ++i) proof.verify(i);
  return static_cast<int64_t>(proof.tensors());
}

}  // namespace mantissa
