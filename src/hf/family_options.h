// What a config.json says as options of section "model", in parts: what the classes of transformers have where a file says nothing
// (family_defaults.cpp); positions and windows (family_positions.cpp); limits of the whole, in the words of the file (family_limits.cpp).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "hf/family_keys.h"
#include "mantissa/hf/hugging_face.h"

namespace mantissa {

// A key that may also be null, which then says that the heads of queries decide.
struct ClassDefault {
  std::optional<int64_t> absent = {};  // none: as null
  bool null = true;
};

// Of the configuration class of transformers, the same in 4.57 and 5.23.
struct ClassDefaults {
  Family family;
  ClassDefault kv_heads, head_dim;
  int64_t positions;
  double norm_eps, rope_theta;
  int64_t experts = 0, experts_per_token = 0;
};
const ClassDefaults& class_defaults(Family family);  // of those with RMSNorm

// Angles of rotary positions: rope_theta and rope_scaling, as transformers 4 writes them, or both in rope_parameters, as 5 does.
void read_rope(FamilyKeys& keys, const std::string& source, Family family, nlohmann::json& model);

// Which layers see only the last tokens: by layer_types, else all of Mixtral's, and of Qwen's those from max_window_layers on.
void read_windows(FamilyKeys& keys, Family family, nlohmann::json& model);

// The model, if it keeps the limits of a run's config. Throws Error(usage) that names file and key as the file has it.
ModelConfig family_model(const nlohmann::json& options, FamilyKeys& keys, Family family, const std::string& source);

}  // namespace mantissa
