// Lists what differs between the config of a checkpoint and that of a run, one line a value: "model.hidden_size: 64 in the checkpoint, 128
// here".
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "mantissa/checkpoint/tensor_reader.h"
#include "mantissa/config/run_config.h"

namespace mantissa {

inline std::string scalar_text(const Scalar& scalar) {
  return std::visit(
      []<class T>(const T& value) {
        if constexpr (std::is_same_v<T, std::monostate>) return std::string("null");
        if constexpr (std::is_same_v<T, bool>) return std::string(value ? "true" : "false");
        if constexpr (!std::is_same_v<T, std::monostate> && !std::is_same_v<T, bool>) return text(value);
      },
      scalar);
}

// Returns "hidden_size: 64 in the checkpoint, 128 here" for every scalar that differs.
template <class T>
std::vector<std::string> differences(const char* section, T saved, T current) {
  const std::vector<Field> left = fields_of(saved), right = fields_of(current);
  std::vector<std::string> found;
  for (size_t i = 0; i < left.size(); ++i) {
    const FieldKind kind = left[i].kind();
    const bool single = kind != FieldKind::list && kind != FieldKind::map && kind != FieldKind::object;
    if (!single || left[i].get() == right[i].get()) continue;
    found.push_back(
        text(section, ".", left[i].name, ": ", scalar_text(left[i].get()), " in the checkpoint, ", scalar_text(right[i].get()), " here"));
  }
  return found;
}

// Compares a section that may be null.
template <class Config>
std::vector<std::string> differences(const char* section, const std::optional<Config>& saved, const std::optional<Config>& current) {
  if (saved.has_value() != current.has_value())
    return {text(section, saved ? ": in the checkpoint, null here" : ": null in the checkpoint, not here")};
  return saved ? differences(section, *saved, *current) : std::vector<std::string>();
}

// Returns the key of a line.
inline std::string difference_key(const std::string& line) { return line.substr(0, line.find(':')); }

// In model_change.cpp, like the functions below. Lists differences in the mathematics of a model, of which coefficients of losses, the
// capacity and the padding of the vocabulary are no part. Derived values count as given.
std::vector<std::string> model_differences(const ModelConfig& saved, const ModelConfig& current);

// Like model_differences(), without initial values and the type of logits, which an export does not have.
std::vector<std::string> forward_differences(const ModelConfig& saved, const ModelConfig& current);

// Throws Error(usage) that lists the differences.
void require_same_model(const RunConfig& saved, const RunConfig& current, const std::string& source);

// Checks a run that starts from the weights of a checkpoint: initial values, the type of logits and, with rotary positions, the longest
// sequence may differ; other keys only if checkpoint.allow_model_change lists them, which is logged.
void require_initial_model(const RunConfig& saved, const RunConfig& current, const std::string& source);

// Lists weights of a folder that are codes and are kept in another form here, equal layers taken together: "layers.{0..1}.attn.qkv: e4m3
// 1x32 in the file, e4m3 32x32 here". Their values are those of the file's codes.
std::vector<std::string> reconciled_weights(const TensorReader& weights, const PrecisionPlan& plan);

}  // namespace mantissa
