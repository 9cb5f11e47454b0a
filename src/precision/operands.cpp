#include "mantissa/precision/operands.h"

namespace mantissa {
namespace {

OperandChoice codes(const Quantization& how) { return {.source = OperandSource::codes, .how = how}; }
OperandChoice dequantized(const Quantization& how) { return {.source = OperandSource::dequantized, .how = how}; }

OperandChoice simulated(const Recipe& recipe, const Simulation& how, GemmRole role, int contraction) {
  const int64_t transform = recipe.simulated.hadamard_gemms.holds(role) ? recipe.simulated.hadamard : 0;
  return {.source = OperandSource::simulated, .simulation = how.along(contraction, transform)};
}

// MXFP4 values lie on the grid of E4M3 codes of the same row if no code block has a part of two fake blocks.
bool fake_codes_are_lossless(const Recipe& recipe) {
  return recipe.weight_fake_quant.format == Format::e2m1 && recipe.weight_fake_quant.block_cols % recipe.input.block() == 0;
}

// Returns true if backward multiplies the values of fprop's codes.
bool dequantizes(const Recipe& recipe) { return recipe.backward == BackwardOperands::dequantized && recipe.gemms.fprop; }

OperandSource along_columns(const Recipe& recipe) {
  return recipe.columns == ColumnSource::rows ? OperandSource::requantized : OperandSource::codes;
}

OperandChoice weight_operand(const Recipe& recipe, GemmRole role) {
  const bool quantized = recipe.gemms.holds(role);
  if (recipe.simulated.weight && quantized) return simulated(recipe, recipe.simulated.weight, role, role == GemmRole::fprop ? 1 : 0);
  if (recipe.weight_fake_quant) {
    if (role == GemmRole::fprop && quantized && recipe.input && fake_codes_are_lossless(recipe)) {
      return {.source = OperandSource::fake_codes, .how = {Format::e4m3, 1, recipe.input.block(), ScaleRule::rceil}};
    }
    if (role == GemmRole::dgrad && recipe.backward == BackwardOperands::high_precision) return {};
    return dequantized(recipe.weight_fake_quant);
  }
  if (role == GemmRole::dgrad && dequantizes(recipe) && recipe.weight) return dequantized(recipe.weight);
  if (!recipe.weight || !quantized) return {};
  if (role == GemmRole::fprop || recipe.weight.tiles()) return codes(recipe.weight);
  return {.source = along_columns(recipe), .how = recipe.weight.transposed()};
}

OperandChoice output_grad_operand(const Recipe& recipe, GemmRole role) {
  if (recipe.simulated.output_grad && recipe.gemms.holds(role)) {
    return simulated(recipe, recipe.simulated.output_grad, role, role == GemmRole::dgrad ? 1 : 0);
  }
  if (!recipe.output_grad || !recipe.gemms.holds(role)) return {};
  if (role == GemmRole::dgrad) return codes(recipe.output_grad);
  const bool requantized = recipe.requantizes_output_grad && recipe.gemms.dgrad;
  return {.source = requantized ? OperandSource::requantized : OperandSource::codes, .how = recipe.output_grad.transposed()};
}

OperandChoice input_operand(const Recipe& recipe, GemmRole role) {
  if (recipe.simulated.input && recipe.gemms.holds(role)) {
    return simulated(recipe, recipe.simulated.input, role, role == GemmRole::fprop ? 1 : 0);
  }
  if (role == GemmRole::wgrad && dequantizes(recipe) && recipe.input) return dequantized(recipe.input);
  if (!recipe.input || !recipe.gemms.holds(role)) return {};
  if (role == GemmRole::fprop) return codes(recipe.input);
  return {.source = recipe.gemms.fprop ? along_columns(recipe) : OperandSource::codes, .how = recipe.input.transposed()};
}

std::string quantization_text(const Quantization& how) {
  const ScaleRule usual = how.format == Format::e2m1 ? ScaleRule::flashinfer : ScaleRule::rceil;
  std::string written = text(format_name(how.format), ' ', how.block_rows, 'x', how.block_cols);
  if (how.rule != usual) written += text(' ', scale_rule_name(how.rule));
  return written + scale_range_text(how.range);
}

}  // namespace

GemmOperands choose_operands(const Recipe& recipe, GemmRole role) {
  switch (role) {
    case GemmRole::fprop: return {input_operand(recipe, role), weight_operand(recipe, role)};
    case GemmRole::dgrad: return {output_grad_operand(recipe, role), weight_operand(recipe, role)};
    case GemmRole::wgrad: return {output_grad_operand(recipe, role), input_operand(recipe, role)};
  }
  fail(ExitCode::internal, "no such GEMM");
}

Quantization codes_read(const Recipe& recipe, const OperandChoice& choice, GemmRole role) {
  switch (choice.source) {
    case OperandSource::high:
    case OperandSource::simulated: return {};
    case OperandSource::codes:
    case OperandSource::requantized: return choice.how;
    case OperandSource::dequantized: return role == GemmRole::wgrad ? Quantization{} : choice.how;
    case OperandSource::fake_codes: return recipe.weight_fake_quant;
  }
  return {};
}

SavedAs saved_input(const Recipe& recipe) {
  const OperandSource source = choose_operands(recipe, GemmRole::wgrad).second.source;
  if (source == OperandSource::requantized || source == OperandSource::dequantized) return SavedAs::rows;
  return source == OperandSource::codes && recipe.gemms.fprop ? SavedAs::columns : SavedAs::values;
}

bool dispatches_codes(const Recipe& recipe, bool recorded) {
  return choose_operands(recipe, GemmRole::fprop).first.is_codes() && (saved_input(recipe) == SavedAs::rows || !recorded);
}

std::string operand_text(const Recipe& recipe, const OperandChoice& choice) {
  switch (choice.source) {
    case OperandSource::high: return dtype_name(recipe.compute);
    case OperandSource::codes: return quantization_text(choice.how);
    case OperandSource::requantized: return quantization_text(choice.how) + text(" from 1x", choice.how.block());
    case OperandSource::dequantized: return text(dtype_name(recipe.compute), " of ") + quantization_text(choice.how);
    case OperandSource::simulated: return text(dtype_name(recipe.compute), " of ", choice.simulation);
    case OperandSource::fake_codes: return quantization_text(choice.how) + " of " + quantization_text(recipe.weight_fake_quant);
  }
  return "";
}

std::string gemm_text(const Recipe& recipe, GemmRole role) {
  const GemmOperands operands = choose_operands(recipe, role);
  return operand_text(recipe, operands.first) + " * " + operand_text(recipe, operands.second);
}

}  // namespace mantissa
