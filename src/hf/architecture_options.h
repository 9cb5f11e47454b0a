// Converts a config.json to options of section "model", in parts: defaults of the transformers classes (architecture_defaults.cpp);
// positions and windows (architecture_positions.cpp); and limits, in the words of the file (architecture_limits.cpp).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "hf/architecture_keys.h"
#include "mantissa/hf/hugging_face.h"

namespace mantissa {

// A key that may be null, in which case the query heads decide.
struct ClassDefault {
  std::optional<int64_t> absent = {};  // none: as null
  bool null = true;
};

// Defaults of the configuration class of transformers, the same in 4.57 and 5.23.
struct ClassDefaults {
  Architecture architecture;
  ClassDefault kv_heads, head_dim;
  int64_t positions;
  double norm_eps, rope_theta;
  int64_t experts = 0, experts_per_token = 0;
};
const ClassDefaults& class_defaults(Architecture architecture);  // of those with RMSNorm

// Reads rotary positions: rope_theta and rope_scaling, as transformers 4 writes them, or both in rope_parameters, as 5 does.
void read_rope(ArchitectureKeys& keys, const std::string& source, Architecture architecture, nlohmann::json& model);

// Reads which layers see only the last tokens: by layer_types, else all of Mixtral's, and of Qwen's those from max_window_layers on.
void read_windows(ArchitectureKeys& keys, Architecture architecture, nlohmann::json& model);

// Returns the model, if it keeps the limits of a run's config. Throws Error(usage) that names file and key as the file has it.
ModelConfig architecture_model(const nlohmann::json& options, ArchitectureKeys& keys, Architecture architecture, const std::string& source);

}  // namespace mantissa
