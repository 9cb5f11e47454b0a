// Describes how a matrix is rounded to a format that has values only: free elements, blocks, scales, random rounding and transforms.
#pragma once

#include <ostream>
#include <string>

#include "mantissa/formats/format.h"
#include "mantissa/formats/free_element.h"

namespace mantissa {

// e8m0: a power of two. e4m3: two levels, as in NVFP4: an E4M3 number for each block, and an fp32 number for the tensor.
enum class SimulatedScale : uint8_t { e8m0, e4m3 };

// Blocks of 1 x b run along the contraction of the GEMM that reads the matrix; others are tiles, the same for each GEMM.
struct Simulation {
  FreeElement element{};
  int64_t block_rows = 1, block_cols = 32;
  SimulatedScale scale = SimulatedScale::e8m0;
  ScaleRule rule = ScaleRule::rceil;  // rule of an e8m0 scale
  Rounding rounding = Rounding::nearest;
  int64_t hadamard = 0;  // length of the blocks that are transformed along the contraction first; 0: none
  int contraction = 1;   // the dimension of the matrix that the GEMM contracts over

  bool operator==(const Simulation& other) const = default;
  explicit operator bool() const { return static_cast<bool>(element); }
  // Returns this format, whose blocks are written as for dimension 1, for a GEMM that contracts over `dimension`, with `transform` as
  // hadamard.
  Simulation along(int dimension, int64_t transform) const;
};
std::string element_text(const FreeElement& element);                // "e3m2"
const char* simulated_scale_name(SimulatedScale scale);              // "e8m0", "e4m3"
const char* rounding_name(Rounding rounding);                        // "nearest", "stochastic"
std::ostream& operator<<(std::ostream& out, const Simulation& how);  // "none", "e3m2 1x32 floor", "e2m1 16x1 e4m3 stochastic hadamard 16"

}  // namespace mantissa
