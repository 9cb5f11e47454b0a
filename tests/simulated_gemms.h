// Recipes with simulated operands, and the products of their GEMMs, made one by one.
#pragma once

#include "mantissa/base/integers.h"
#include "mantissa/precision/recipe.h"
#include "ops/quantization_observer.h"
#include "testing.h"

namespace mantissa::test {

inline constexpr GemmSet kAll{true, true, true};

inline constexpr Simulation kRows{.element = {3, 2}, .block_cols = 32}, kTiles{.element = {2, 3}, .block_rows = 16, .block_cols = 8};
inline constexpr Simulation kNvRows{.element = {2, 1}, .block_cols = 16, .scale = SimulatedScale::e4m3};
inline constexpr Simulation kNvTiles{.element = {2, 1}, .block_rows = 16, .block_cols = 16, .scale = SimulatedScale::e4m3};

inline Simulation random(Simulation how) {
  how.rounding = Rounding::stochastic;
  return how;
}

inline Recipe simulating(SimulatedOperands simulated, GemmSet gemms = kAll, Dtype compute = Dtype::bf16) {
  return {.name = "own", .compute = compute, .simulated = simulated, .gemms = gemms};
}

struct NamedRecipe {
  const char* name;
  Recipe recipe;
};
inline std::ostream& operator<<(std::ostream& out, const NamedRecipe& named) { return out << named.name; }

// Returns these behind recipes that every linear operation is tried with.
inline std::vector<NamedRecipe> with_usual(const std::vector<NamedRecipe>& more) {
  std::vector<NamedRecipe> all = {
      {"rows", simulating({.weight = kRows, .input = kRows, .output_grad = kRows})},
      {"tiles", simulating({.weight = kTiles, .input = kTiles, .output_grad = kTiles})},
      {"weight_only", simulating({.weight = kRows}, {true, true, false})},
  };
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// [rows, columns] in fp64.
struct Matrix {
  int64_t rows, columns;
  std::vector<double> data;
};

inline Matrix product(const Matrix& a, bool a_transposed, const Matrix& b, bool b_transposed) {
  const int64_t rows = a_transposed ? a.columns : a.rows, columns = b_transposed ? b.rows : b.columns;
  const int64_t depth = a_transposed ? a.rows : a.columns;
  EXPECT_EQ(depth, b_transposed ? b.columns : b.rows);
  Matrix out{rows, columns, std::vector<double>(static_cast<size_t>(rows * columns))};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t k = 0; k < depth; ++k) {
        out.data[static_cast<size_t>(i * columns + j)] +=
            a.data[static_cast<size_t>(a_transposed ? k * a.columns + i : i * a.columns + k)] *
            b.data[static_cast<size_t>(b_transposed ? j * b.columns + k : k * b.columns + j)];
      }
    }
  }
  return out;
}

// The values that a GEMM reads of an operand that it contracts over `dimension`.
inline Matrix read(const Tensor& x, const Recipe& recipe, const Simulation& format, GemmRole role, int dimension,
                   const RoundingDraws& draws = {}) {
  if (!format || !recipe.gemms.holds(role)) return {x.dim(0), x.dim(1), values(x)};
  Simulation how = format;
  how.contraction = dimension;
  if (recipe.simulated.hadamard_gemms.holds(role)) how.hadamard = recipe.simulated.hadamard;
  if (dimension == 0 && how.block_rows == 1) std::swap(how.block_rows, how.block_cols);
  if (draws.columns == 0) how.rounding = Rounding::nearest;
  const int64_t rows = how.hadamard > 0 && dimension == 0 ? round_up(x.dim(0), how.hadamard) : x.dim(0);
  const Tensor out = empty(x.device(), recipe.compute, {rows, x.dim(1)});
  x.device().run(Simulate{.x = converted(x, Dtype::bf16), .out = out, .how = how, .draws = draws});
  return {rows, x.dim(1), values(out)};
}

// Results of the GEMMs of a linear operation.
struct Products {
  Tensor y, dx, dw;
};

// Compares them with products of the values that each GEMM reads of an operand, which `of` returns.
using ReadBy = std::function<Matrix(const Tensor&, OperandRole, GemmRole, int)>;
inline void expect_three_gemms(const Products& found, const Tensor& x, const Tensor& w, const Tensor& dy, const ReadBy& of,
                               double relative) {
  using enum OperandRole;
  const Matrix y = product(of(x, input, GemmRole::fprop, 1), false, of(w, weight, GemmRole::fprop, 1), true);
  const Matrix dx = product(of(dy, output_grad, GemmRole::dgrad, 1), false, of(w, weight, GemmRole::dgrad, 0), false);
  const Matrix dw = product(of(dy, output_grad, GemmRole::wgrad, 0), true, of(x, input, GemmRole::wgrad, 0), false);
  EXPECT_TRUE(close(values(found.y), y.data, relative));
  EXPECT_TRUE(close(values(found.dx), dx.data, relative));
  EXPECT_TRUE(close(values(found.dw), dw.data, 1e-5));
}

inline const Simulation& format_of(const Recipe& recipe, OperandRole operand) {
  const SimulatedOperands& s = recipe.simulated;
  return operand == OperandRole::weight ? s.weight : operand == OperandRole::input ? s.input : s.output_grad;
}

}  // namespace mantissa::test
