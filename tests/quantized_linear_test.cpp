// Which operand each product of a linear operation reads: results equal the products of the operands that the recipe names, built here one
// by one with fp64 sums.
#include <cmath>

#include "mantissa/ops/ops.h"
#include "testing.h"

namespace mantissa::test {
namespace {

constexpr int64_t kTokens = 37;  // no multiple of a block

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

const std::vector<Named> kRecipes = {
    {"high", recipe({}, {}, {}, {})},
    {"mxfp8_tiles", recipe(kTiles, kRows, kRows, kAll)},
    {"mxfp8_rows", recipe(kRows, kRows, kRows, kAll)},
    {"mxfp8_weights", recipe(kTiles, {}, {}, {true, true, false})},
    {"mxfp4_qat", recipe({}, {}, {}, {}, kFake)},
    {"mxfp4_qat_mxfp8_act", recipe({}, kRows, kRows, kAll, kFake)},
    {"fp8_block", recipe(kTiles128, kRows128, kRows128, kAll)},
    {"e5m2_floor", recipe(kFloor, kFloor, kFloor, kAll)},
    {"fp32_compute", recipe(kTiles, {}, kRows, {false, true, false}, {}, Dtype::f32)},
    {"dgrad_only", recipe(kRows, {}, kRows, {false, true, false})},
    {"fprop_only", recipe(kTiles, kRows, {}, {true, false, false})},
    {"wgrad_only", recipe({}, kRows, kRows, {false, false, true})},
    {"input_in_wgrad_only", recipe({}, kRows, {}, {false, false, true})},
};

// [rows, cols] in fp64.
struct Matrix {
  int64_t rows, cols;
  std::vector<double> data;
  double at(int64_t r, int64_t c) const { return data[static_cast<size_t>(r * cols + c)]; }
};

Matrix product(const Matrix& a, bool a_transposed, const Matrix& b, bool b_transposed) {
  const int64_t rows = a_transposed ? a.cols : a.rows, depth = a_transposed ? a.rows : a.cols, cols = b_transposed ? b.rows : b.cols;
  Matrix out{rows, cols, std::vector<double>(static_cast<size_t>(rows * cols))};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += (a_transposed ? a.at(k, i) : a.at(i, k)) * (b_transposed ? b.at(j, k) : b.at(k, j));
      out.data[static_cast<size_t>(i * cols + j)] = sum;
    }
  }
  return out;
}

class QuantizedLinear : public BackendTest, public ::testing::WithParamInterface<Named> {
 protected:
  // Channels in whole blocks of the recipe.
  int64_t in() const { return 3 * std::max<int64_t>(32, GetParam().recipe.block()); }
  int64_t out() const { return 2 * std::max<int64_t>(32, GetParam().recipe.block()); }

  Tensor bf16_tensor(Backend& device, Shape shape, uint32_t what) {
    return tensor_of(device, Dtype::bf16, shape, random_values(shape.elements(), what));
  }

  // The values a product reads in place of x; columnwise blocks see missing tokens as zeros.
  Matrix read(const Tensor& x, const Quantization& how) {
    if (!how) return {x.dim(0), x.dim(1), values(x)};
    return read(quantized(x, how), x.dim(0));
  }
  Matrix read(const QuantizedTensor& codes, int64_t rows) {
    const Tensor out = empty(codes.device(), Dtype::f32, codes.shape);
    codes.device().run(Dequantize{.x = codes, .out = out});
    return {rows, codes.shape[1], values(out.slice(0, rows))};
  }
  // Columnwise codes from rowwise ones.
  Matrix shifted(const Tensor& x, const Quantization& how) {
    const int64_t rows = whole_blocks(x.dim(0), how.block());
    const Tensor padded = zeros(x.device(), Dtype::bf16, {rows, x.dim(1)});
    x.device().run(Convert{.x = x, .out = padded.slice(0, x.dim(0))});
    const QuantizedTensor columns = empty_quantized(x.device(), padded.shape(), how.transposed());
    x.device().run(RequantizeColumns{.x = quantized(padded, how), .out = columns});
    return read(columns, x.dim(0));
  }
};

// bf16 results differ by their rounding, 2^-8 relative; sums of 96 products in fp32 by far less.
void expect_near(const Tensor& actual, const Matrix& expected, double relative) {
  const std::vector<double> a = values(actual);
  ASSERT_EQ(a.size(), expected.data.size());
  double square = 0;
  for (const double value : expected.data) square += value * value;
  const double rms = std::sqrt(square / static_cast<double>(a.size()));
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], expected.data[i], relative * std::abs(expected.data[i]) + 1e-5 * rms) << i;
}

TEST_P(QuantizedLinear, ReadsTheOperandsOfTheRecipe) {
  const Recipe& r = GetParam().recipe;
  for (Backend* device : {&fast(), &reference()}) {
    SCOPED_TRACE(device->name());
    const Tensor x = bf16_tensor(*device, {kTokens, in()}, 1), w = bf16_tensor(*device, {out(), in()}, 2),
                 dy = bf16_tensor(*device, {kTokens, out()}, 3);
    const Quantization stored = r.weight_fake_quant ? r.weight_fake_quant : r.weight;
    Leaf leaf{zeros(*device, Dtype::f32, {out(), in()})};
    Tape tape;
    const Tape::Scope scope(&tape);
    const Var input = tape.input(x);
    const LinearWeight weight(w, stored ? quantized(w, stored) : QuantizedTensor(), &leaf);
    const Var y = linear(input, weight, Var(), r);
    tape.backward(y, dy);

    const auto read_by = [&](GemmRole role, const Quantization& how) { return r.gemms.holds(role) ? how : Quantization{}; };
    const bool fake{r.weight_fake_quant};
    const Matrix w_fprop = read(w, fake ? r.weight_fake_quant : read_by(GemmRole::fprop, r.weight));
    const Quantization dgrad_weight = read_by(GemmRole::dgrad, r.weight);
    const Matrix w_dgrad = fake ? w_fprop : dgrad_weight.rowwise() && dgrad_weight ? shifted(w, r.weight) : read(w, dgrad_weight);
    expect_near(y.value(), product(read(x, read_by(GemmRole::fprop, r.input)), false, w_fprop, true), 0x1p-8);
    expect_near(tape.take_gradient(input), product(read(dy, read_by(GemmRole::dgrad, r.output_grad)), false, w_dgrad, false), 0x1p-8);
    const Matrix x_wgrad = !read_by(GemmRole::wgrad, r.input)  ? read(x, {})
                           : read_by(GemmRole::fprop, r.input) ? shifted(x, r.input)
                                                               : read(x, r.input.transposed());
    const Quantization columns = read_by(GemmRole::wgrad, r.output_grad).transposed();
    expect_near(leaf.grad, product(read(dy, columns), true, x_wgrad, false), 0);
  }
}

TEST_P(QuantizedLinear, SavesTheInputAsCodesWhereBackwardReadsThem) {
  const Recipe& r = GetParam().recipe;
  const Tensor w = bf16_tensor(fast(), {out(), in()}, 2);
  const Quantization stored = r.weight_fake_quant ? r.weight_fake_quant : r.weight;
  Leaf leaf{zeros(fast(), Dtype::f32, {out(), in()})};
  const LinearWeight weight(w, stored ? quantized(w, stored) : QuantizedTensor(), &leaf);
  constexpr int64_t kMany = 4096;
  Tensor x = bf16_tensor(fast(), {kMany, in()}, 1);
  Tape tape;
  const Tape::Scope scope(&tape);
  const int64_t before = fast().allocator_stats().in_use;
  const Var y = linear(tape.input(x), weight, Var(), r);
  x = Tensor();
  const int64_t kept = fast().allocator_stats().in_use - before - y.value().bytes();
  const int64_t bf16_bytes = kMany * in() * 2, code_bytes = kMany * in() + kMany * in() / 32;
  const bool codes = r.input && r.gemms.fprop && r.gemms.wgrad;
  EXPECT_NEAR(static_cast<double>(kept), static_cast<double>(codes ? code_bytes - bf16_bytes : 0), 0.02 * static_cast<double>(bf16_bytes));
}

// The loss computes its products in chunks of whole blocks of tokens: what a linear operation and the softmax kernel give, but for the
// order of the sums over tokens.
TEST_P(QuantizedLinear, GivesTheLossTheGradientsOfASeparateProjection) {
  const Recipe& r = GetParam().recipe;
  constexpr int64_t kMany = 165;  // two chunks of 64 rows, and a rest
  const Tensor x = bf16_tensor(fast(), {kMany, in()}, 1), w = bf16_tensor(fast(), {out(), in()}, 2);
  const Quantization stored = r.weight_fake_quant ? r.weight_fake_quant : r.weight;
  const QuantizedTensor codes = stored ? quantized(w, stored) : QuantizedTensor();
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
  expect_near(fused.grad, {out(), in(), values(separate.grad)}, 1e-5);
  EXPECT_TRUE(same_bits(tape.take_gradient(first), tape.take_gradient(second)));
}

INSTANTIATE_TEST_SUITE_P(, QuantizedLinear, ::testing::ValuesIn(kRecipes), [](const auto& c) { return c.param.name; });

}  // namespace
}  // namespace mantissa::test
