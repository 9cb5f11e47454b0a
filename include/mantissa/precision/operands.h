// Chooses which copy of an operand each GEMM of a linear layer takes. This is the only place where a recipe becomes operands. Blocks run
// along the contraction of the GEMM at hand (fprop: in; dgrad: out; wgrad: tokens).
//
//   GEMM    contraction   first                      second
//   fprop   in            input, rowwise             weight, rowwise or tiles
//   dgrad   out           output_grad, rowwise       weight, columnwise (requantized from rowwise codes, or from values) or tiles
//   wgrad   tokens        output_grad, columnwise    input, columnwise (requantized from the saved rowwise codes, or from values)
#pragma once

#include <string>
#include <vector>

#include "mantissa/precision/recipe.h"

namespace mantissa {

enum class OperandSource {
  high,         // values in the compute dtype
  codes,        // codes from the bf16 values (rounded to bf16 first where compute is fp32)
  requantized,  // columnwise codes from the rowwise codes, by exponent shift: never a second quantization
  dequantized,  // values decoded from the codes of weight_fake_quant, else of fprop's operand; bf16 holds them exactly unless a scale is
                // extreme
  fake_codes,   // e2m1 codes of weight_fake_quant, which the GEMM reads as the E4M3 codes of `how`: the same values
  simulated,    // values of a format without codes, from the bf16 values
};

struct OperandChoice {
  OperandSource source = OperandSource::high;
  Quantization how = {};       // format of the codes that the GEMM reads (fake_codes: E4M3, though E2M1 is stored); dequantized: Q
  Simulation simulation = {};  // simulated

  bool operator==(const OperandChoice& other) const = default;
  bool is_codes() const {
    return source == OperandSource::codes || source == OperandSource::requantized || source == OperandSource::fake_codes;
  }
};

struct GemmOperands {
  OperandChoice first, second;
};
GemmOperands choose_operands(const Recipe& recipe, GemmRole role);

// Returns the format of the codes that the kernel of this GEMM gets for an operand; none: it gets values. A `dequantized` weight arrives as
// its resident codes, which the kernel decodes; a `dequantized` input of wgrad is decoded before, so the kernel gets values.
Quantization codes_read(const Recipe& recipe, const OperandChoice& choice, GemmRole role);

// Form in which the input is kept for backward, if wgrad reads it: values as they came, rowwise codes, or columnwise codes, which
// forward makes beside the rowwise ones.
enum class SavedAs { values, rows, columns };

// The operands of all GEMMs of a linear layer, decided once from its recipe, when the layer is built.
struct LinearOperands {
  LinearOperands(const Recipe& recipe = {});  // NOLINT: a recipe decides all of it

  Dtype compute;  // dtype of operands that are not quantized
  int64_t block;  // length of the blocks of codes, 0 without codes
  GemmOperands fprop, dgrad, wgrad;
  SavedAs saved_input;

  const GemmOperands& gemm(GemmRole role) const { return role == GemmRole::fprop ? fprop : role == GemmRole::dgrad ? dgrad : wgrad; }
  // Returns true if rows of the input can travel between ranks as the rowwise codes of fprop: nothing reads their values. recorded:
  // backward follows.
  bool moves_input_codes(bool recorded) const { return fprop.first.is_codes() && (saved_input == SavedAs::rows || !recorded); }
  // Returns true if the output gradient comes as rowwise codes, which another rank may have made.
  bool takes_gradient_codes() const { return wgrad.first.source == OperandSource::requantized; }
};

// Returns "bf16", "e4m3 32x32", "e4m3 32x1 from 1x32", "bf16 of e2m1 1x32" or "e4m3 1x32 of e2m1 1x32". Scale rules other than the default
// of the role are named: "e4m3 1x32 floor".
std::string operand_text(const Recipe& recipe, const OperandChoice& choice);
// Returns both operands: "e4m3 1x32 * e4m3 32x32".
std::string gemm_text(const Recipe& recipe, GemmRole role);

// Demands of recipes with simulated operands on their other members and on a weight.

void check_simulated(const Recipe& recipe, std::vector<RecipeProblem>& problems);

// Lengths of which the rows and the columns of a weight must be multiples, so that no block of any operand is cut by a part or a rank.
struct SimulatedLengths {
  std::vector<int64_t> out, in;
};
SimulatedLengths simulated_lengths(const Recipe& recipe);

// Returns the part of a plan's hash that a recipe with simulated operands adds; "" for other recipes.
std::string simulated_text(const Recipe& recipe);

}  // namespace mantissa
