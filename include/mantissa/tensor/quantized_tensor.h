// A matrix as element codes with one scale per block: the description of its format and the handle on its two buffers.
#pragma once

#include <ostream>
#include <string>
#include <variant>

#include "mantissa/formats/format.h"
#include "mantissa/formats/free_element.h"
#include "mantissa/tensor/tensor.h"

namespace mantissa {

// Describes how one matrix is quantized. Blocks are block_rows x block_cols: 1 x b lie along a row ("rowwise"), b x 1 along a column
// ("columnwise"), b x b are tiles. b is 32 in MX formats and 128 in 128-block recipes; fake quantization takes others.
struct Quantization {
  Format format = Format::none;
  int64_t block_rows = 1, block_cols = 32;
  ScaleRule rule = ScaleRule::rceil;
  ScaleRange range{};
  int8_t tensor_exponent = 0;  // nvfp4: the scale of the tensor is 2^tensor_exponent

  bool operator==(const Quantization& other) const = default;
  CodeRule code_rule() const { return {rule, tensor_exponent}; }
  explicit operator bool() const { return format != Format::none; }
  int64_t block() const { return block_rows > block_cols ? block_rows : block_cols; }
  bool tiles() const { return block_rows > 1 && block_rows == block_cols; }
  bool rowwise() const { return block_rows == 1; }
  bool columnwise() const { return block_cols == 1 && block_rows > 1; }
  // Returns the same format, rule and range in blocks along the other dimension; tiles serve both and stay.
  Quantization transposed() const { return {format, block_cols, block_rows, rule, range, tensor_exponent}; }
};
const char* format_name(Format format);                                // "none", "e4m3", "e5m2", "e2m1", "nvfp4"
const char* scale_rule_name(ScaleRule rule);                           // "rceil", "floor", ...
std::string scales_text(const Quantization& how);                      // " 2^-126..2^125", "" for the whole range; " 2^-8" of nvfp4
std::ostream& operator<<(std::ostream& out, const Quantization& how);  // "e4m3 32x32 rceil", "nvfp4 1x16 nearest 2^-8"

// Holds codes u8 [R, C], never transposed; E2M1 packs two along a row, [R, C/2], with the even column in the low nibble. Scales are u8,
// E8M0 or of NVFP4 E4M3, compact and row-major, one for each block. Blocks count from the first row and column, so those at the end may be
// smaller. `shape` is [R, C]; a grouped weight [E, R, C] is kept as [E * R, C].
struct QuantizedTensor {
  Tensor codes, scales;
  Shape shape;
  Quantization how;

  bool defined() const { return codes.defined(); }
  int64_t dim(int i) const { return shape[i]; }
  int64_t bytes() const { return codes.bytes() + scales.bytes(); }
  Backend& device() const { return codes.device(); }
};

// A matrix in high precision or quantized.
using Value = std::variant<Tensor, QuantizedTensor>;
Shape shape_of(const Value& value);
Backend& device_of(const Value& value);

// Return the shapes of the two buffers. Throw unless `shape` is a matrix, whose rows of E2M1 fill whole bytes.
Shape codes_shape(const Shape& shape, const Quantization& how);
Shape scales_shape(const Shape& shape, const Quantization& how);

// Describes how a matrix is rounded to a format that has values only: free elements, blocks, scales, random rounding and transforms.

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
