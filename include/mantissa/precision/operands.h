// Chooses which copy of an operand each GEMM of a linear layer takes. This is the only place where a recipe becomes operands. Blocks run
// along the contraction of the GEMM at hand (fprop: in; dgrad: out; wgrad: tokens).
//
//   GEMM    contraction   first                      second
//   fprop   in            input, rowwise             weight, rowwise or tiles
//   dgrad   out           output_grad, rowwise       weight, columnwise (requantized from rowwise codes) or tiles
//   wgrad   tokens        output_grad, columnwise    input, columnwise (requantized from the saved rowwise codes, if there are any)
#pragma once

#include <string>

#include "mantissa/precision/recipe.h"

namespace mantissa {

enum class OperandSource {
  high,         // values in the compute dtype
  codes,        // codes from the bf16 values (rounded to bf16 first where compute is fp32)
  requantized,  // columnwise codes from the rowwise codes, by exponent shift: never a second quantization
  fake,         // values DQ(Q(w)), exact in bf16; Q is weight_fake_quant
  fake_codes,   // e4m3 codes of these values, lossless
};

struct OperandChoice {
  OperandSource source = OperandSource::high;
  Quantization how = {};  // codes, requantized and fake_codes: of the codes; fake: the fake quantization

  bool operator==(const OperandChoice& other) const = default;
  bool is_codes() const { return source != OperandSource::high && source != OperandSource::fake; }
};

struct GemmOperands {
  OperandChoice first, second;
};
GemmOperands choose_operands(const Recipe& recipe, GemmRole role);

// Returns how the codes that the GEMM reads for this operand are quantized; none: it reads values. Of a fake-quantized weight these are the
// resident codes, whose values are DQ(Q(w)).
Quantization codes_read(const Recipe& recipe, const OperandChoice& choice);

// Returns whether the input is kept for backward as its rowwise codes, else in the compute dtype; wgrad reads it.
bool saves_input_codes(const Recipe& recipe);

// Returns "bf16", "e4m3 32x32", "e4m3 32x1 from 1x32", "bf16 of e2m1 1x32" or "e4m3 1x32 of e2m1 1x32". Scale rules other than the default
// of the role are named: "e4m3 1x32 floor".
std::string operand_text(const Recipe& recipe, const OperandChoice& choice);
// Returns both operands: "e4m3 1x32 * e4m3 32x32".
std::string gemm_text(const Recipe& recipe, GemmRole role);

}  // namespace mantissa
