// The scales of block FP8: a number for each 128x128 tile of a weight, counted from its first row and column, so that the last tiles may be
// smaller. Files keep them in F32, BF16 or F8_E8M0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mantissa/io/safetensors.h"

namespace mantissa {

inline constexpr int64_t kTile = 128;  // rows and columns

inline int64_t tiles_along(int64_t size) { return (size + kTile - 1) / kTile; }
inline bool holds_tile_scales(FileDtype dtype) {
  return dtype == FileDtype::f32 || dtype == FileDtype::bf16 || dtype == FileDtype::f8_e8m0;
}

struct TileScales {
  std::vector<float> values;                     // row-major
  int64_t columns = 0;                           // number of tiles in a row
  std::optional<std::string> no_power_of_two{};  // the first: "X.weight_scale_inv[0, 3] is 0.0123"

  // Returns the scale of an element of the weight.
  float at(int64_t row, int64_t column) const { return values[static_cast<size_t>(row / kTile * columns + column / kTile)]; }
};

// Reads a matrix of scales. Throws Error(data) that names `where` and the first that is NaN, Inf, zero or negative.
TileScales read_tile_scales(SafetensorsFolder& files, const SafetensorsEntry& entry, const std::string& where);

// Returns the E8M0 code of a scale, none if it is no power of two that E8M0 has; and codes as a file of this type holds them.
std::optional<uint8_t> e8m0_of_scale(float scale);
std::vector<std::byte> tile_scales_as(FileDtype dtype, std::span<const std::byte> codes);

}  // namespace mantissa
