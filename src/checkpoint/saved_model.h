// Reads the model of a checkpoint: config, plan, tokenizer and files, and checks that its tensors and codes are those of the model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_reader.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

// A value that differs between the config of a checkpoint and that of a run; as text "model.hidden_size: 64 in the checkpoint, 128 here".
struct Difference {
  std::string key;
  std::optional<std::string> saved;  // none: a section that is null here
  std::string here;
};
inline std::ostream& operator<<(std::ostream& out, const Difference& one) {
  return out << one.key << ": " << (one.saved ? *one.saved + " " : "") << "in the checkpoint, " << one.here << " here";
}

inline std::string scalar_text(const Scalar& scalar) {
  return std::visit(
      []<class T>(const T& value) {
        if constexpr (std::is_same_v<T, std::monostate>) return std::string("null");
        if constexpr (std::is_same_v<T, bool>) return std::string(value ? "true" : "false");
        if constexpr (!std::is_same_v<T, std::monostate> && !std::is_same_v<T, bool>) return text(value);
      },
      scalar);
}

// Returns every scalar of a section that differs.
template <class T>
std::vector<Difference> differences(const char* section, T saved, T current) {
  const std::vector<Field> left = fields_of(saved), right = fields_of(current);
  std::vector<Difference> found;
  for (size_t i = 0; i < left.size(); ++i) {
    const FieldKind kind = left[i].kind();
    const bool single = kind != FieldKind::list && kind != FieldKind::map && kind != FieldKind::object;
    if (!single || left[i].get() == right[i].get()) continue;
    found.push_back({text(section, ".", left[i].name), scalar_text(left[i].get()), scalar_text(right[i].get())});
  }
  return found;
}

// Compares a section that may be null.
template <class Config>
std::vector<Difference> differences(const char* section, const std::optional<Config>& saved, const std::optional<Config>& current) {
  if (saved && current) return differences(section, *saved, *current);
  if (saved) return {{section, std::nullopt, "null"}};
  return current ? std::vector<Difference>{{section, "null", "not"}} : std::vector<Difference>();
}

// Returns a model with the values of options that it leaves to others.
ModelConfig with_derived(ModelConfig model);

// In saved_model.cpp, like the functions below. Lists differences in the mathematics of a model, of which coefficients of losses, the
// capacity and the padding of the vocabulary are no part. Derived values count as given.
std::vector<Difference> model_differences(const ModelConfig& saved, const ModelConfig& current);

// Like model_differences(), without initial values and the type of logits, which an export does not have.
std::vector<Difference> forward_differences(const ModelConfig& saved, const ModelConfig& current);

// Throws Error(usage) that lists the differences.
void require_same_model(const RunConfig& saved, const RunConfig& current, const std::string& source);

// Checks a run that starts from the weights of a checkpoint: initial values, the type of logits and, with rotary positions, the longest
// sequence may differ; other keys only if checkpoint.allow_model_change lists them, which is logged.
void require_initial_model(const RunConfig& saved, const RunConfig& current, const std::string& source);

// Lists weights of a folder that are codes and are kept in another form here, equal layers taken together: "layers.{0..1}.attn.qkv: e4m3
// 1x32 in the file, e4m3 32x32 here". Their values are those of the file's codes.
std::vector<std::string> reconciled_weights(const TensorReader& weights, const PrecisionPlan& plan);

// Returns the tokenizer that a checkpoint was made with. Throws Error(data).
std::optional<Tokenizer> saved_tokenizer(CheckpointReader& reader);

// Return the config of the checkpoint that a path stands for, as load_checkpoint() finds it, and the tokenizer that it was trained with,
// else that of the files which came with its model. Throw what load_checkpoint() does, and Error(data).
RunConfig config_saved_at(const std::filesystem::path& path);
std::optional<Tokenizer> tokenizer_saved_at(const std::filesystem::path& path);

// Returns true if the checkpoint and the data both have a tokenizer, and not the same.
bool has_other_tokenizer(const CheckpointReader& reader, const Data& data);

// Makes the codes of every quantized weight again from its master on a device, one weight after the other, and compares them with the
// manifest's, as require_same_codes() does. Returns how many there are; a checkpoint without a plan says nothing of codes.
int64_t verify_codes(CheckpointReader& reader, Backend& device);

// The config of a checkpoint, for one process, and the plan of its model, without the model. Throws Error(data) if its tensors are not the
// model's.
struct SavedModel {
  RunConfig config;
  PrecisionPlan plan;
};
SavedModel saved_model(const CheckpointReader& reader);

// Returns the tokenizer of the tokenizer.json among the files; none: there is no such file. Throws Error(data) that begins with `source`
// where it is damaged or not supported.
std::optional<Tokenizer> tokenizer_of(const std::vector<TokenizerFile>& files, const std::string& source);

// Returns the files that came with the model that the run started from. Throws Error(data) for names that are none of kTokenizerFiles.
std::vector<TokenizerFile> tokenizer_files(CheckpointReader& reader);

// Returns a config as these tensor ranks hold its model, whatever it was trained on. Throws Error(usage) where it cannot be divided so.
RunConfig for_ranks(RunConfig config, const ModelRanks& ranks);

// Returns the plan of the model as `use`, made of the saved config by for_ranks(), computes it. Compares the saved config with the tensors
// before anything of the size that it asks for is made: Error(data) where they do not fit.
PrecisionPlan plan_for_tensors(const RunConfig& saved, const CheckpointReader& reader, const RunConfig& use);

}  // namespace mantissa
