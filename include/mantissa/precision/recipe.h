// A recipe is data: it gives each operand of a linear layer's three GEMMs a number format. Code asks for formats, never for a name.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "mantissa/tensor/quantized_tensor.h"

namespace mantissa {

// The GEMMs of y = x W^T: fprop gives y; dgrad dx = dy W; wgrad dW = dy^T x.
enum class GemmRole { fprop, dgrad, wgrad };
inline constexpr std::array kGemmRoles = {GemmRole::fprop, GemmRole::dgrad, GemmRole::wgrad};
constexpr const char* gemm_name(GemmRole role) { return role == GemmRole::fprop ? "fprop" : role == GemmRole::dgrad ? "dgrad" : "wgrad"; }

struct GemmSet {
  bool fprop = false, dgrad = false, wgrad = false;
  bool operator==(const GemmSet& other) const = default;
  bool any() const { return fprop || dgrad || wgrad; }
  bool holds(GemmRole role) const { return role == GemmRole::fprop ? fprop : role == GemmRole::dgrad ? dgrad : wgrad; }
};

// Source of the codes along columns, which dgrad reads of a weight and wgrad of an input: the codes along rows, by a shift of the exponent,
// as in FP8-Flow-MoE; or the values, as in Transformer Engine and torchao. Tiles have one copy of codes for both.
enum class ColumnSource { rows, values };

// Form in which dgrad and wgrad read the operands that fprop reads quantized (`backward_override` of Transformer Engine). quantized: as
// `gemms` says. dequantized: the values of fprop's codes and of the fake-quantized weight. high_precision: the values before quantization.
// It changes only what dgrad reads of a fake-quantized weight: other operands are in high precision once `gemms` lacks dgrad and wgrad.
enum class BackwardOperands { quantized, dequantized, high_precision };

// Operands that are values of formats without codes. Their blocks are written as for a contraction over columns.
struct SimulatedOperands {
  Simulation weight = {}, input = {}, output_grad = {};
  int64_t hadamard = 0;  // length of the blocks in which both operands of `hadamard_gemms` are transformed
  GemmSet hadamard_gemms = {};

  bool operator==(const SimulatedOperands& other) const = default;
  bool any() const { return weight || input || output_grad; }
};

struct Recipe {
  std::string name = {};                                   // as in the config; for messages
  Dtype compute = Dtype::bf16;                             // dtype of operands that are not quantized
  Quantization weight_fake_quant = {};                     // rounds the weight in forward; the gradient passes straight through
  Quantization weight = {}, input = {}, output_grad = {};  // operands of the GEMMs in `gemms`
  SimulatedOperands simulated = {};                        // operands of these GEMMs that have no codes
  GemmSet gemms = {};                                      // the GEMMs that take quantized operands
  ColumnSource columns = ColumnSource::rows;
  BackwardOperands backward = BackwardOperands::quantized;  // all but quantized need `gemms` without dgrad and wgrad
  // wgrad's codes of the output gradient are requantized from dgrad's, which are made elsewhere.
  bool requantizes_output_grad = false;

  bool quantizes() const { return weight_fake_quant || quantizes_operands() || simulated.any(); }
  bool quantizes_operands() const { return weight || input || output_grad; }  // to codes
  // dgrad_reads_stored_codes(): dgrad reads the codes of the weight in memory, or what follows from them; reads_weight_codes(): some GEMM
  // does; reads_only_weight_codes(): every GEMM that reads the weight does.
  bool dgrad_reads_stored_codes() const;
  bool reads_weight_codes() const { return weight && (gemms.fprop || dgrad_reads_stored_codes()); }
  bool reads_only_weight_codes() const { return weight && gemms.fprop && dgrad_reads_stored_codes(); }
  // Returns the length of the blocks of the operands: 32 (MX) or 128; 0 without quantized operands.
  int64_t block() const;
};

// Names what is wrong with a recipe regardless of the model. `key` is the member as in the config: "weight.block", "gemms".
struct RecipeProblem {
  std::string key, message;
};
std::vector<RecipeProblem> recipe_problems(const Recipe& recipe);

}  // namespace mantissa
