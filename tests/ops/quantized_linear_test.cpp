// The operand that each GEMM of a linear operation reads: results equal the GEMMs of the operands that the recipe names, built here one by
// one with fp64 sums.
#include <cmath>
#include <map>

#include "ops/ops.h"
#include "ops/quantization_observer.h"
#include "testing.h"

namespace mantissa::test::quantized_linear_test {

constexpr int64_t kTokens = 37;  // not a multiple of a block

struct Named {
  const char* name;
  Recipe recipe;
};
std::ostream& operator<<(std::ostream& out, const Named& named) { return out << named.name; }

constexpr Quantization kRows{Format::e4m3, 1, 32}, kTiles{Format::e4m3, 32, 32}, kFake{Format::e2m1, 1, 32, ScaleRule::flashinfer};
constexpr Quantization kRows128{Format::e4m3, 1, 128}, kTiles128{Format::e4m3, 128, 128}, kFloor{Format::e5m2, 1, 32, ScaleRule::floor};
constexpr GemmSet kAll{true, true, true};

Recipe recipe(Quantization weight, Quantization input, Quantization output_grad, GemmSet gemms, Quantization fake = {},
              Dtype compute = Dtype::bf16) {
  return {.name = "own",
          .compute = compute,
          .weight_fake_quant = fake,
          .weight = weight,
          .input = input,
          .output_grad = output_grad,
          .gemms = gemms};
}

Recipe of_values(Recipe from) {
  from.columns = ColumnSource::values;
  return from;
}

Recipe backward_by(BackwardOperands backward, Recipe from) {
  from.backward = backward;
  return from;
}

constexpr GemmSet kFprop{true, false, false};
constexpr Quantization kGradients{Format::e5m2, 1, 32}, kSearched{Format::e2m1, 1, 32, ScaleRule::mse},
    kNvfp4{Format::nvfp4, 1, 16, ScaleRule::nearest, {}, -4};

const std::vector<Named> kRecipes = {
    {"high", recipe({}, {}, {}, {})},
    {"mxfp8_tiles", recipe(kTiles, kRows, kRows, kAll)},
    {"mxfp8_rows", recipe(kRows, kRows, kRows, kAll)},
    {"mxfp8_weights", recipe(kTiles, {}, {}, {true, true, false})},
    {"mxfp4_qat", recipe({}, {}, {}, {}, kFake)},
    {"mxfp4_qat_mxfp8_act", recipe({}, kRows, kRows, kAll, kFake)},
    {"mxfp4_qat_mxfp4_act", backward_by(BackwardOperands::dequantized, recipe({}, kFake, {}, kFprop, kFake))},
    {"nvfp4_qat", recipe({}, {}, {}, {}, kNvfp4)},
    {"nvfp4_qat_nvfp4_act", backward_by(BackwardOperands::dequantized, recipe({}, kNvfp4, {}, kFprop, kNvfp4))},
    {"nvfp4_weights_of_mxfp8_inputs", recipe({}, kRows, kRows, kAll, kNvfp4)},
    {"narrow_inputs_of_wider_blocks", recipe({}, kSearched, kRows, {true, true, false}, {Format::e2m1, 1, 64, ScaleRule::floor})},
    {"narrow_inputs_in_fp32", backward_by(BackwardOperands::dequantized, recipe({}, kFake, {}, kFprop, {Format::e2m1, 1, 16}, Dtype::f32))},
    {"narrow_inputs_of_tiles", backward_by(BackwardOperands::high_precision, recipe(kTiles, kSearched, {}, kFprop))},
    {"fp8_block", recipe(kTiles128, kRows128, kRows128, kAll)},
    {"e5m2_floor", recipe(kFloor, kFloor, kFloor, kAll)},
    {"fp32_compute", recipe(kTiles, {}, kRows, {false, true, false}, {}, Dtype::f32)},
    {"dgrad_only", recipe(kRows, {}, kRows, {false, true, false})},
    {"fprop_only", recipe(kTiles, kRows, {}, {true, false, false})},
    {"wgrad_only", recipe({}, kRows, kRows, {false, false, true})},
    {"input_in_wgrad_only", recipe({}, kRows, {}, {false, false, true})},
    {"mxfp8_te", of_values(recipe(kRows, kRows, kGradients, kAll))},
    {"tiles_columns_of_values", of_values(recipe(kTiles, kRows, kRows, kAll))},
    {"rows128_columns_of_values", of_values(recipe(kRows128, kRows128, kRows128, kAll))},
    {"weights_columns_of_values", of_values(recipe(kRows, {}, {}, {true, true, false}))},
    {"dgrad_columns_of_values", of_values(recipe(kFloor, {}, kRows, {false, true, false}))},
    {"fake_columns_of_values", of_values(recipe({}, kRows, kRows, kAll, kFake))},
    {"dequantized_fake", backward_by(BackwardOperands::dequantized, recipe({}, kRows, {}, kFprop, kFake))},
    {"dequantized_rows", backward_by(BackwardOperands::dequantized, recipe(kFloor, kRows, {}, kFprop))},
    {"dequantized_tiles", backward_by(BackwardOperands::dequantized, recipe(kTiles128, kRows128, {}, kFprop))},
    {"dequantized_weights", backward_by(BackwardOperands::dequantized, recipe(kTiles, {}, {}, kFprop, {}, Dtype::f32))},
    {"high_precision_fake", backward_by(BackwardOperands::high_precision, recipe({}, kRows, {}, kFprop, kFake))},
    {"high_precision_weights", backward_by(BackwardOperands::high_precision, recipe({}, {}, {}, {}, kFake))},
};

// [rows, cols] in fp64.
struct Matrix {
  int64_t rows, cols;
  std::vector<double> data;
  std::vector<double> magnitudes{};  // sum |a b|, for the product of a GEMM
  double at(int64_t r, int64_t c) const { return data[static_cast<size_t>(r * cols + c)]; }
};

Matrix product(const Matrix& a, bool a_transposed, const Matrix& b, bool b_transposed) {
  const int64_t rows = a_transposed ? a.cols : a.rows, depth = a_transposed ? a.rows : a.cols, cols = b_transposed ? b.rows : b.cols;
  Matrix out{rows, cols, std::vector<double>(static_cast<size_t>(rows * cols)), std::vector<double>(static_cast<size_t>(rows * cols))};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const auto at = static_cast<size_t>(i * cols + j);
      for (int64_t k = 0; k < depth; ++k) {
        const double term = (a_transposed ? a.at(k, i) : a.at(i, k)) * (b_transposed ? b.at(j, k) : b.at(k, j));
        out.data[at] += term;
        out.magnitudes[at] += std::abs(term);
      }
    }
  }
  return out;
}

class QuantizedLinear : public BackendTest, public ::testing::WithParamInterface<Named> {
 protected:
  // Channels in whole blocks of 32, unless odd_; the last blocks of 128 are smaller.
  int64_t in() const { return GetParam().recipe.block() == 128 ? 320 : odd_ ? 74 : 96; }
  int64_t out() const { return GetParam().recipe.block() == 128 ? 200 : odd_ ? 51 : 64; }

  // Row r times 2^(rows e(r)), column c times 2^(cols e(c)); e is in [-12, 12].
  Tensor spread_tensor(Backend& device, Shape shape, uint32_t what, int rows, int cols) {
    const auto exponent = [](int64_t index) { return static_cast<int>(index * 37 % 25) - 12; };
    std::vector<double> drawn = random_values(shape.elements(), what);
    for (size_t i = 0; i < drawn.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      drawn[i] = std::ldexp(drawn[i], rows * exponent(at / shape[1]) + cols * exponent(at % shape[1]));
    }
    return tensor_of(device, Dtype::bf16, shape, drawn);
  }

  static QuantizedTensor stored(const Tensor& w) {
    const Recipe& r = GetParam().recipe;
    const Quantization how = r.weight_fake_quant ? r.weight_fake_quant : r.weight;
    return how ? quantized(w, how) : QuantizedTensor();
  }
  void expect_operands(const Tensor& x, const Tensor& w, const Tensor& dy);

  // The values a GEMM reads in place of x; columnwise blocks see missing tokens as zeros.
  Matrix read(const Tensor& x, const Quantization& how) {
    if (!how) return {x.dim(0), x.dim(1), values(x)};
    return read(quantized(x, how), x.dim(0));
  }
  Matrix read(const QuantizedTensor& codes, int64_t rows) {
    const Tensor out = empty(codes.device(), Dtype::f32, codes.shape);
    codes.device().run(Dequantize{.x = codes, .out = out});
    return {rows, codes.shape[1], values(out.slice(0, rows))};
  }
  // Columnwise codes from rowwise ones: of the values that those stand for, which are exact in bf16.
  Matrix shifted(const Tensor& x, const Quantization& how) {
    const Tensor held = empty(x.device(), Dtype::bf16, x.shape());
    x.device().run(FakeQuantize{.x = x, .out = held, .how = how});
    return read(held, how.transposed());
  }
  void expect_operands_on_all() {
    for (Backend* device : {&fast(), &reference()}) {
      for (const int spread : {0, 1}) {
        SCOPED_TRACE(text(device->name(), spread == 0 ? "" : ", uneven rows"));
        expect_operands(spread_tensor(*device, {kTokens, in()}, 1, spread, 0), spread_tensor(*device, {out(), in()}, 2, spread, 0),
                        spread_tensor(*device, {kTokens, out()}, 3, -spread, -spread));
      }
    }
  }

  bool odd_ = false;
};

// bf16 results differ by their rounding, 2^-8 relative; sums of at most 384 products in fp32 by far less.
void expect_near(const Tensor& actual, const Matrix& expected, double relative) {
  const std::vector<double> a = values(actual);
  ASSERT_EQ(a.size(), expected.data.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_NEAR(a[i], expected.data[i], relative * std::abs(expected.data[i]) + 1e-6 * expected.magnitudes[i]) << i;
  }
}

// y = x w^T and its gradients against the GEMMs of the operands that the recipe names.
void QuantizedLinear::expect_operands(const Tensor& x, const Tensor& w, const Tensor& dy) {
  const Recipe& r = GetParam().recipe;
  Leaf leaf{zeros(x.device(), Dtype::f32, {out(), in()})};
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var input = tape.input(x);
  const LinearWeight weight(w, stored(w), &leaf);
  const Var y = linear(input, weight, Var(), r);
  tape.backward(y, dy);

  const auto read_by = [&](GemmRole role, const Quantization& how) { return r.gemms.holds(role) ? how : Quantization{}; };
  const bool fake{r.weight_fake_quant};
  const Matrix w_fprop = read(w, fake ? r.weight_fake_quant : read_by(GemmRole::fprop, r.weight));
  const Quantization dgrad_weight = read_by(GemmRole::dgrad, r.weight);
  const bool as_fprop = r.backward == BackwardOperands::dequantized, direct = r.columns == ColumnSource::values;
  const auto along_columns = [&](const Tensor& of, const Quantization& how) {
    return direct ? read(of, how.transposed()) : shifted(of, how);
  };
  const Matrix w_dgrad = r.backward == BackwardOperands::high_precision ? read(w, {})
                         : fake || as_fprop                             ? w_fprop
                         : dgrad_weight.rowwise() && dgrad_weight       ? along_columns(w, r.weight)
                                                                        : read(w, dgrad_weight);
  expect_near(y.value(), product(read(x, read_by(GemmRole::fprop, r.input)), false, w_fprop, true), 0x1p-8);
  expect_near(tape.take_gradient(input), product(read(dy, read_by(GemmRole::dgrad, r.output_grad)), false, w_dgrad, false), 0x1p-8);
  const Matrix x_wgrad = as_fprop                             ? read(x, r.input)
                         : !read_by(GemmRole::wgrad, r.input) ? read(x, {})
                         : read_by(GemmRole::fprop, r.input)  ? along_columns(x, r.input)
                                                              : read(x, r.input.transposed());
  const Quantization columns = read_by(GemmRole::wgrad, r.output_grad).transposed();
  expect_near(leaf.grad, product(read(dy, columns), true, x_wgrad, false), 0);
}

// Even rows lose nothing when their codes are requantized into columns. In the second operands tokens of x and rows of w reach from 2^-12
// to 2^12, and dy makes the terms of dx and dw equal again: those that a shift loses weigh as much as the others.
TEST_P(QuantizedLinear, ReadsTheOperandsOfTheRecipe) { expect_operands_on_all(); }

TEST_P(QuantizedLinear, ReadsThemAlsoWhereRowsAndColumnsEndWithinABlock) {
  odd_ = true;
  expect_operands_on_all();
}

TEST_P(QuantizedLinear, SavesTheInputAsCodesWhereBackwardReadsThem) {
  const Recipe& r = GetParam().recipe;
  const Tensor w = random_tensor(fast(), Dtype::bf16, {out(), in()}, 2);
  Leaf leaf{zeros(fast(), Dtype::f32, {out(), in()})};
  const LinearWeight weight(w, stored(w), &leaf);
  constexpr int64_t kMany = 1024;
  Tensor x = random_tensor(fast(), Dtype::bf16, {kMany, in()}, 1);
  Tape tape;
  const Tape::Scope scope(&tape);
  const int64_t before = fast().allocator_stats().in_use;
  const Var y = linear(tape.input(x), weight, Var(), r);
  x = Tensor();
  const int64_t kept = fast().allocator_stats().in_use - before - y.value().bytes();
  const int64_t bf16_bytes = kMany * in() * 2,
                code_bytes = kMany * in() / (is_four_bit(r.input.format) ? 2 : 1) + kMany * in() / (r.input ? r.input.block() : 32);
  const bool codes = r.input && r.gemms.fprop && (r.gemms.wgrad || r.backward == BackwardOperands::dequantized);
  EXPECT_NEAR(static_cast<double>(kept), static_cast<double>(codes ? code_bytes - bf16_bytes : 0), 0.02 * static_cast<double>(bf16_bytes));
}

// The loss computes its GEMMs in chunks of whole blocks of tokens: it gives the results of a linear operation and the softmax kernel, but
// for the order of the sums over tokens.
TEST_P(QuantizedLinear, GivesTheLossTheGradientsOfASeparateProjection) {
  const Recipe& r = GetParam().recipe;
  constexpr int64_t kMany = 165;  // two chunks of 64 rows, and a rest
  const Tensor x = random_tensor(fast(), Dtype::bf16, {kMany, in()}, 1), w = random_tensor(fast(), Dtype::bf16, {out(), in()}, 2);
  const QuantizedTensor codes = stored(w);
  const Tensor targets = random_indices(fast(), kMany, out() - 3, 9);
  Leaf fused{zeros(fast(), Dtype::f32, {out(), in()})}, separate{zeros(fast(), Dtype::f32, {out(), in()})};
  Tape tape;
  const Tape::Scope scope(&tape);
  const Var first = tape.input(x), second = tape.input(x);
  const LossOptions options{.vocab = out() - 3, .target_count = kMany, .logits_dtype = Dtype::bf16, .chunk_elements = 1};
  tape.backward(cross_entropy(first, LinearWeight(w, codes, &fused), targets, options, r));
  const Var logits = linear(second, LinearWeight(w, codes, &separate), Var(), r);
  const Tensor dlogits = empty_like(logits.value()), loss = empty(fast(), Dtype::f32, {kMany});
  fast().run(CrossEntropy{
      .logits = logits.value(), .targets = targets, .loss = loss, .vocab = out() - 3, .scale = 1.0 / kMany, .dlogits = dlogits});
  tape.backward(logits, dlogits);
  EXPECT_TRUE(close(fused.grad, separate.grad, 2e-5));
  EXPECT_TRUE(same_bits(tape.take_gradient(first), tape.take_gradient(second)));
}

// Rows have 55 tokens, also where the loss goes through them in chunks of 64.
TEST_P(QuantizedLinear, ShowsObserversWhichTokensArePadding) {
  const std::vector<int32_t> lengths = {55, 10, 0};
  constexpr int64_t kMany = 165;
  const PaddingScope padding(lengths, 55);
  std::map<OperandRole, std::vector<bool>> counted;
  const ObserverScope observer([&](const QuantizedOperand& operand) {
    ASSERT_TRUE(operand.rows.defined());
    ASSERT_EQ(operand.rows.dim(0), operand.x.dim(0));
    for (const double row : values(operand.rows)) counted[operand.role].push_back(row >= 0.0);
  });
  const Tensor x = random_tensor(fast(), Dtype::bf16, {kMany, in()}, 1), w = random_tensor(fast(), Dtype::bf16, {out(), in()}, 2);
  const Tensor targets = random_indices(fast(), kMany, out() - 3, 9);
  Leaf leaf{zeros(fast(), Dtype::f32, {out(), in()})};
  Tape tape;
  const Tape::Scope scope(&tape);
  const LossOptions options{.vocab = out() - 3, .target_count = kMany, .logits_dtype = Dtype::bf16, .chunk_elements = 1};
  tape.backward(cross_entropy(tape.input(x), LinearWeight(w, stored(w), &leaf), targets, options, GetParam().recipe));
  const Recipe& r = GetParam().recipe;
  EXPECT_EQ(counted.contains(OperandRole::output_grad), r.output_grad && (r.gemms.dgrad || r.gemms.wgrad));
  for (const auto& [role, rows] : counted) {
    ASSERT_EQ(std::ssize(rows), kMany) << role_name(role);
    for (int64_t i = 0; i < kMany; ++i) EXPECT_EQ(rows[static_cast<size_t>(i)], i < 65) << role_name(role) << ' ' << i;
  }
}

INSTANTIATE_TEST_SUITE_P(, QuantizedLinear, ::testing::ValuesIn(kRecipes), [](const auto& c) { return c.param.name; });

}  // namespace mantissa::test::quantized_linear_test
