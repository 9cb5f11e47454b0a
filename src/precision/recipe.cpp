#include "mantissa/precision/recipe.h"

#include "mantissa/formats/nvfp4.h"
#include "mantissa/precision/operands.h"

namespace mantissa {
namespace {

using Problems = std::vector<RecipeProblem>;

std::string block_text(const Quantization& how) { return text('[', how.block_rows, ", ", how.block_cols, ']'); }

void check_range(const std::string& key, const Quantization& how, Problems& problems) {
  if (how.rule != ScaleRule::flashinfer || how.range == ScaleRange{}) return;
  problems.push_back({key + ".scale_range", "must be [-127, 127]: flashinfer uses the whole range"});
}

// NVFP4 has one form, and what is its own no other format has.
void check_two_levels(const std::string& key, const Quantization& how, Problems& problems) {
  if (how.format != Format::nvfp4) {
    if (how.rule == ScaleRule::nearest) problems.push_back({key + ".rule", "must not be nearest: that is the rule of nvfp4"});
    if (how.tensor_exponent != 0)
      problems.push_back({key + ".tensor_exponent", text("is of nvfp4 only, and the format is ", format_name(how.format), ": remove it")});
    return;
  }
  if (how.rule != ScaleRule::nearest && how.rule != ScaleRule::mse) problems.push_back({key + ".rule", "must be nearest or mse for nvfp4"});
  if (how.range != ScaleRange{}) problems.push_back({key + ".scale_range", "is not of nvfp4: set tensor_exponent"});
  if (how.block_rows != 1 || how.block_cols != kNvfp4Block)
    problems.push_back({key + ".block", "must be [1, 16], as nvfp4 has them, got " + block_text(how)});
}

void check_operand(const std::string& key, const Quantization& how, bool tiles_allowed, Problems& problems) {
  if (!how) return;
  const bool of_input = key == "input", is_e2m1 = how.format == Format::e2m1, two_levels = how.format == Format::nvfp4;
  if (is_four_bit(how.format) && !of_input) {
    problems.push_back(
        {key + ".format", text("must be e4m3 or e5m2: ", format_name(how.format), " is for weight_fake_quant and input only")});
  }
  check_two_levels(key, how, problems);
  if (two_levels) return;
  if (how.rule == ScaleRule::flashinfer && !(of_input && is_e2m1)) {
    problems.push_back(
        {key + ".rule", "must be rceil, floor, even, ceil or mse: flashinfer is for weight_fake_quant and input in e2m1 only"});
  }
  check_range(key, how, problems);
  const bool right = (how.block_cols == 32 || how.block_cols == 128) && (how.block_rows == 1 || (tiles_allowed && how.tiles()));
  if (right) return;
  problems.push_back(
      {key + ".block", text("must be [1, b]", tiles_allowed ? " or [b, b]" : "", " with b = 32 or 128, got ", block_text(how))});
}

void check_fake_quant(const Quantization& how, Problems& problems) {
  if (!how) return;
  check_two_levels("weight_fake_quant", how, problems);
  if (how.format == Format::nvfp4) return;
  if (how.rule == ScaleRule::flashinfer && how.format != Format::e2m1) {
    problems.push_back(
        {"weight_fake_quant.rule", text("flashinfer is for e2m1 only, and the format is ", format_name(how.format),
                                        "; set rule to rceil, floor, even, ceil or mse, also where flashinfer comes from the base")});
  }
  check_range("weight_fake_quant", how, problems);
  if (how.block_rows != 1 || how.block_cols < 2 || how.block_cols % 2 != 0) {
    problems.push_back({"weight_fake_quant.block", "must be [1, n] with an even n, got " + block_text(how)});
  }
}

void check_gemms(const Recipe& recipe, Problems& problems) {
  const bool any = recipe.quantizes_operands() || recipe.simulated.any();
  if (any && !recipe.gemms.any()) {
    std::vector<const char*> names;
    const auto add = [&](const char* name, bool quantized) {
      if (quantized) names.push_back(name);
    };
    add("weight", recipe.weight || recipe.simulated.weight);
    add("input", recipe.input || recipe.simulated.input);
    add("output_grad", recipe.output_grad || recipe.simulated.output_grad);
    problems.push_back(
        {"gemms", text("is empty, so nothing would read the ", recipe.simulated.any() ? "quantized or simulated " : "quantized ",
                       joined(names), ": list some of fprop, dgrad, wgrad, or make the operands null")});
  } else if (recipe.gemms.any() && !any) {
    problems.push_back({"gemms", "must be empty: none of weight, input and output_grad is quantized or simulated"});
  }
}

// A byte holds two codes of a row, so E2M1 has no codes along columns.
void check_narrow_input(const Recipe& recipe, Problems& problems) {
  if (!is_four_bit(recipe.input.format) || !recipe.gemms.wgrad) return;
  problems.push_back({"gemms",
                      "must not list wgrad beside an input in four bits, which has no codes along tokens: take backward dequantized, "
                      "under which wgrad multiplies the values of fprop's codes, or high_precision"});
}

// Where nothing along columns is quantized, `columns` would do nothing.
void check_columns(const Recipe& recipe, Problems& problems) {
  const bool of_weight = recipe.weight.rowwise() && recipe.weight && recipe.gemms.dgrad;
  const bool of_input = recipe.input && recipe.gemms.fprop && recipe.gemms.wgrad;
  if (recipe.columns == ColumnSource::rows || of_weight || of_input) return;
  problems.push_back({"columns",
                      "has no effect: it applies to an input that fprop and wgrad read as codes, and to a weight in blocks of one row that "
                      "dgrad reads as codes; leave it out"});
}

void check_backward(const Recipe& recipe, Problems& problems) {
  if (recipe.backward == BackwardOperands::quantized) return;
  const bool dequantizes = recipe.backward == BackwardOperands::dequantized, of_codes = recipe.gemms.fprop;
  const char* const name = dequantizes ? "dequantized" : "high_precision";
  if (recipe.gemms.dgrad || recipe.gemms.wgrad)
    problems.push_back({"gemms", text("must not list dgrad or wgrad beside backward ", name, ", under which these multiply values")});
  for (const auto& [key, given] : {std::pair{"output_grad", recipe.output_grad.format != Format::none},
                                   {"simulate.output_grad", static_cast<bool>(recipe.simulated.output_grad)}})
    if (given) problems.push_back({key, text("must be null beside backward ", name, ", under which gradients are not quantized")});
  if (dequantizes && of_codes && (recipe.simulated.weight || recipe.simulated.input))
    problems.push_back({"backward", "dequantized needs codes, but fprop also multiplies simulated operands: simulate none of them"});
  if (dequantizes && !((recipe.weight || recipe.input) && of_codes))
    problems.push_back({"backward", "dequantized has no effect: fprop multiplies no codes"});
  if (!dequantizes && !recipe.weight_fake_quant && !of_codes)
    problems.push_back({"backward", "high_precision has no effect: fprop multiplies values before quantization"});
}

}  // namespace

bool Recipe::dgrad_reads_stored_codes() const {
  if (!weight) return false;
  if (gemms.dgrad) return columns == ColumnSource::rows || weight.tiles();
  return gemms.fprop && backward == BackwardOperands::dequantized;
}

int64_t Recipe::block() const {
  for (const Quantization* how : {&weight, &input, &output_grad}) {
    if (*how) return how->block();
  }
  return 0;
}

std::vector<RecipeProblem> recipe_problems(const Recipe& recipe) {
  Problems problems;
  check_operand("weight", recipe.weight, true, problems);
  check_operand("input", recipe.input, false, problems);
  check_operand("output_grad", recipe.output_grad, false, problems);
  check_fake_quant(recipe.weight_fake_quant, problems);
  if (problems.empty()) {
    for (const auto& [name, how] : {std::pair{"input", recipe.input}, {"output_grad", recipe.output_grad}}) {
      if (!how || how.block() == recipe.block()) continue;
      problems.push_back({text(name, ".block"), text("has blocks of ", how.block(), " beside blocks of ", recipe.block(),
                                                     ": a recipe has one block length (weight_fake_quant aside)")});
    }
  }
  if (recipe.weight && recipe.weight_fake_quant)
    problems.push_back(
        {"weight_fake_quant", "excludes weight: a weight is multiplied as its codes or fake-quantized; make one of them null"});
  check_gemms(recipe, problems);
  check_narrow_input(recipe, problems);
  check_simulated(recipe, problems);
  if (problems.empty()) check_columns(recipe, problems);
  if (problems.empty()) check_backward(recipe, problems);
  return problems;
}

}  // namespace mantissa
