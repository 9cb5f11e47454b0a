// The scales of block FP8: a number for each 128x128 tile of a weight, counted from its first row and column, so that the last tiles may be
// smaller. Files keep them in F32, BF16 or F8_E8M0.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hf/hf_weights.h"
#include "io/safetensors.h"

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

// Reads a matrix of scales from the bytes of its tensor. Throws Error(data) that names `where` and the first that is NaN, Inf, zero or
// negative.
TileScales read_tile_scales(std::span<const std::byte> bytes, const SafetensorsEntry& entry, const std::string& where);

// Returns the E8M0 code of a scale, none if it is no power of two that E8M0 has; and codes as a file of this type holds them.
std::optional<uint8_t> e8m0_of_scale(float scale);
std::vector<std::byte> tile_scales_as(FileDtype dtype, std::span<const std::byte> codes);

// Checks whether a server that multiplies MXFP4 weights as E4M3 in 128x128 tiles, as servers for Hopper do, would lose nothing.

struct TileFit {
  int64_t tiles = 0, lossy = 0;
  std::string first = {};  // the first that loses: "model.layers.0.mlp.experts.3.up_proj.weight, rows 128 to 255, columns 0 to 127"
};

// Counts the 128x128 tiles of a folder's E2M1 tensors, of each matrix from its first row and column, and those in which no one E8M0 scale
// makes all elements E4M3: the largest is beyond 448, or one is off the grid of 2^-9. Scales that differ by at most 2^14 always fit. Throws
// Error(data) for a scale that is NaN.
TileFit fit_of_tiles(HfWeights& folder);

}  // namespace mantissa
