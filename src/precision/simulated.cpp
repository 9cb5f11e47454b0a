#include "precision/simulated.h"

namespace mantissa {
namespace {

constexpr int64_t kLongestBlock = 65536;

void check_format(const std::string& key, const Simulation& how, std::vector<RecipeProblem>& problems) {
  if (!how) return;
  const auto length = [](int64_t size) { return size >= 1 && size <= kLongestBlock; };
  if (!length(how.block_rows) || !length(how.block_cols)) {
    problems.push_back({key + ".block", text("must be [1, n] or [rows, columns] of 1 to ", kLongestBlock, ", got [", how.block_rows, ", ",
                                             how.block_cols, ']')});
  }
  if (how.rule == ScaleRule::flashinfer) problems.push_back({key + ".rule", "must be rceil, floor, even or ceil"});
  if (how.scale == SimulatedScale::e4m3 && how.rule != ScaleRule::rceil) {
    problems.push_back({key + ".rule", "is of scales in e8m0, and the scale is e4m3: leave it out"});
  }
}

// An operand is read as codes, as values of one format, or in high precision.
void check_excluded(const char* name, const Simulation& how, const Quantization& codes, std::vector<RecipeProblem>& problems) {
  if (how && codes) problems.push_back({text("simulate.", name), text("excludes ", name, ": make one of them null")});
}

const char* unfit_hadamard_gemms(const SimulatedOperands& simulated) {
  if (simulated.hadamard > 0)
    return "is empty, so nothing would be transformed: list some of fprop, dgrad, wgrad, or set simulate.hadamard to 0";
  return "must be empty: simulate.hadamard is 0";
}

bool both_simulated(const Recipe& recipe, GemmRole role) {
  const GemmOperands operands = choose_operands(recipe, role);
  return operands.first.source == OperandSource::simulated && operands.second.source == OperandSource::simulated;
}

void check_transform(const Recipe& recipe, std::vector<RecipeProblem>& problems) {
  const SimulatedOperands& simulated = recipe.simulated;
  if (simulated.hadamard != 0 && simulated.hadamard != 16 && simulated.hadamard != 32) {
    return problems.push_back({"simulate.hadamard", text("must be 16 or 32, or 0 for none, got ", simulated.hadamard)});
  }
  if ((simulated.hadamard > 0) != simulated.hadamard_gemms.any()) {
    return problems.push_back({"simulate.hadamard_gemms", unfit_hadamard_gemms(simulated)});
  }
  for (const GemmRole role : kGemmRoles) {
    const bool both = both_simulated(recipe, role);
    if (!simulated.hadamard_gemms.holds(role) || both) continue;
    problems.push_back({"simulate.hadamard_gemms",
                        text("lists ", gemm_name(role), ", whose operands must both be simulated, so that their product stays as it was")});
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
  check_excluded("weight", simulated.weight, recipe.weight, problems);
  check_excluded("input", simulated.input, recipe.input, problems);
  check_excluded("output_grad", simulated.output_grad, recipe.output_grad, problems);
  if (simulated.weight && recipe.weight_fake_quant) {
    problems.push_back({"simulate.weight", "excludes weight_fake_quant: make one of them null"});
  }
  if (problems.empty()) check_transform(recipe, problems);
}

SimulatedLengths simulated_lengths(const Recipe& recipe) {
  SimulatedLengths of;
  const GemmOperands fprop = choose_operands(recipe, GemmRole::fprop), dgrad = choose_operands(recipe, GemmRole::dgrad),
                     wgrad = choose_operands(recipe, GemmRole::wgrad);
  add_lengths(fprop.first, nullptr, &of.in);
  add_lengths(fprop.second, &of.out, &of.in);
  add_lengths(dgrad.first, nullptr, &of.out);
  add_lengths(dgrad.second, &of.out, &of.in);
  add_lengths(wgrad.first, nullptr, &of.out);
  add_lengths(wgrad.second, nullptr, &of.in);
  return of;
}

std::string simulated_text(const Recipe& recipe) {
  if (!recipe.simulated.any()) return "";
  return text("simulated ", gemm_text(recipe, GemmRole::fprop), ", ", gemm_text(recipe, GemmRole::dgrad), ", ",
              gemm_text(recipe, GemmRole::wgrad), '|');
}

}  // namespace mantissa
