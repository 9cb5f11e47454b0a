// Checks whether a server that multiplies MXFP4 weights as E4M3 in 128x128 tiles, as servers for Hopper do, would lose nothing.
#pragma once

#include <cstdint>
#include <string>

#include "mantissa/hf/hf_weights.h"

namespace mantissa {

struct TileFit {
  int64_t tiles = 0, lossy = 0;
  std::string first = {};  // the first that loses: "model.layers.0.mlp.experts.3.up_proj.weight, rows 128 to 255, columns 0 to 127"
};

// Counts the 128x128 tiles of a folder's E2M1 tensors, of each matrix from its first row and column, and those in which no one E8M0 scale
// makes all elements E4M3: the largest is beyond 448, or one is off the grid of 2^-9. Scales that differ by at most 2^14 always fit. Throws
// Error(data) for a scale that is NaN.
TileFit fit_of_tiles(HfWeights& folder);

}  // namespace mantissa
