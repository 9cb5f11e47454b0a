#include "mantissa/precision/operands.h"

namespace mantissa {
namespace {

OperandChoice codes(const Quantization& how) { return {.source = OperandSource::codes, .how = how}; }
OperandChoice dequantized(const Quantization& how) { return {.source = OperandSource::dequantized, .how = how}; }

OperandChoice simulated(const Recipe& recipe, const Simulation& how, GemmRole role, int contraction) {
  const int64_t transform = recipe.simulated.hadamard_gemms.holds(role) ? recipe.simulated.hadamard : 0;
  return {.source = OperandSource::simulated, .simulation = how.along(contraction, transform)};
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
    // The GEMM reads codes of both operands where the stored codes are in the format of the input, and where MXFP4 values can be written as
    // E4M3 codes in blocks of the input, exactly: if each of those lies within one block of weight_fake_quant.
    const Quantization& stored = recipe.weight_fake_quant;
    if (role == GemmRole::fprop && quantized && recipe.input) {
      const bool four_bits = is_four_bit(stored.format) && recipe.input.format == stored.format;
      if (four_bits && stored.block_cols == recipe.input.block()) return codes(stored);
      if (stored.format == Format::e2m1 && recipe.input.format != Format::nvfp4 && stored.block_cols % recipe.input.block() == 0)
        return {.source = OperandSource::fake_codes, .how = {Format::e4m3, 1, recipe.input.block(), ScaleRule::rceil}};
    }
    if (role == GemmRole::dgrad && recipe.backward == BackwardOperands::high_precision) return {};
    return dequantized(stored);
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
  const ScaleRule usual = how.format == Format::nvfp4  ? ScaleRule::nearest
                          : how.format == Format::e2m1 ? ScaleRule::flashinfer
                                                       : ScaleRule::rceil;
  std::string written = text(format_name(how.format), ' ', how.block_rows, 'x', how.block_cols);
  if (how.rule != usual) written += text(' ', scale_rule_name(how.rule));
  return written + scales_text(how);
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

LinearOperands::LinearOperands(const Recipe& recipe)
    : compute(recipe.compute),
      block(recipe.block()),
      fprop(choose_operands(recipe, GemmRole::fprop)),
      dgrad(choose_operands(recipe, GemmRole::dgrad)),
      wgrad(choose_operands(recipe, GemmRole::wgrad)),
      saved_input(SavedAs::values) {
  const OperandSource source = wgrad.second.source;
  if (source == OperandSource::requantized || source == OperandSource::dequantized) saved_input = SavedAs::rows;
  if (source == OperandSource::codes && recipe.gemms.fprop) saved_input = SavedAs::columns;
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

namespace {

constexpr int64_t kLongestBlock = 65536;

void check_format(const std::string& key, const Simulation& how, std::vector<RecipeProblem>& problems) {
  if (!how) return;
  const auto length = [](int64_t size) { return size >= 1 && size <= kLongestBlock; };
  if (!length(how.block_rows) || !length(how.block_cols)) {
    problems.push_back({key + ".block", text("must be [1, n] or [rows, columns] of 1 to ", kLongestBlock, ", got [", how.block_rows, ", ",
                                             how.block_cols, ']')});
  }
  if (how.rule == ScaleRule::flashinfer || how.rule == ScaleRule::mse || how.rule == ScaleRule::nearest) {
    problems.push_back({key + ".rule", "must be rceil, floor, even or ceil"});
  }
  if (how.scale == SimulatedScale::e4m3 && how.rule != ScaleRule::rceil) {
    problems.push_back({key + ".rule", "applies to e8m0 scales only; remove it for scale e4m3"});
  }
}

void check_transform(const Recipe& recipe, std::vector<RecipeProblem>& problems) {
  const SimulatedOperands& simulated = recipe.simulated;
  if (simulated.hadamard != 0 && simulated.hadamard != 16 && simulated.hadamard != 32) {
    return problems.push_back({"simulate.hadamard", text("must be 16 or 32, or 0 for none, got ", simulated.hadamard)});
  }
  if ((simulated.hadamard > 0) != simulated.hadamard_gemms.any()) {
    return problems.push_back(
        {"simulate.hadamard_gemms",
         simulated.hadamard == 0
             ? "must be empty: simulate.hadamard is 0"
             : "is empty, so nothing would be transformed: list some of fprop, dgrad, wgrad, or set simulate.hadamard to 0"});
  }
  for (const GemmRole role : kGemmRoles) {
    const auto [first, second] = choose_operands(recipe, role);
    const bool both = first.source == OperandSource::simulated && second.source == OperandSource::simulated;
    if (!simulated.hadamard_gemms.holds(role) || both) continue;
    problems.push_back(
        {"simulate.hadamard_gemms",
         text("lists ", gemm_name(role), ", of which both operands must be simulated: a transform of one alone would change the product")});
  }
}

void add_lengths(const OperandChoice& choice, std::vector<int64_t>* rows, std::vector<int64_t>* columns) {
  if (choice.source != OperandSource::simulated) return;
  const Simulation& how = choice.simulation;
  if (rows) rows->push_back(how.block_rows);
  if (columns) columns->push_back(how.block_cols);
  std::vector<int64_t>* const contracted = how.contraction == 0 ? rows : columns;
  if (contracted && how.hadamard > 0) contracted->push_back(how.hadamard);
}

}  // namespace

void check_simulated(const Recipe& recipe, std::vector<RecipeProblem>& problems) {
  const SimulatedOperands& simulated = recipe.simulated;
  check_format("simulate.weight", simulated.weight, problems);
  check_format("simulate.input", simulated.input, problems);
  check_format("simulate.output_grad", simulated.output_grad, problems);
  // An operand is read as codes, as values of one format, or in high precision.
  const auto exclude = [&](const char* name, const Simulation& how, const Quantization& codes) {
    if (how && codes) problems.push_back({text("simulate.", name), text("excludes ", name, ": make one of them null")});
  };
  exclude("weight", simulated.weight, recipe.weight);
  exclude("input", simulated.input, recipe.input);
  exclude("output_grad", simulated.output_grad, recipe.output_grad);
  if (simulated.weight && recipe.weight_fake_quant) {
    problems.push_back({"simulate.weight", "excludes weight_fake_quant: make one of them null"});
  }
  if (problems.empty()) check_transform(recipe, problems);
}

SimulatedLengths simulated_lengths(const Recipe& recipe) {
  SimulatedLengths of;
  const LinearOperands operands(recipe);
  add_lengths(operands.fprop.first, nullptr, &of.in);
  add_lengths(operands.fprop.second, &of.out, &of.in);
  add_lengths(operands.dgrad.first, nullptr, &of.out);
  add_lengths(operands.dgrad.second, &of.out, &of.in);
  add_lengths(operands.wgrad.first, nullptr, &of.out);
  add_lengths(operands.wgrad.second, nullptr, &of.in);
  return of;
}

std::string simulated_text(const Recipe& recipe) {
  if (!recipe.simulated.any()) return "";
  return text("simulated ", gemm_text(recipe, GemmRole::fprop), ", ", gemm_text(recipe, GemmRole::dgrad), ", ",
              gemm_text(recipe, GemmRole::wgrad), '|');
}

}  // namespace mantissa
